# %% [markdown]
# # Deeper · Where the memory goes
#
# What does a training keep in memory, and which part of it grows with the images?
#
# > **What you'll do:** measure, stage by stage, what a training of chapter 08's network allocates.
# >
# > **What you'll learn:** how often the weights are held on $k$ devices; which part grows with the
# > images; how much memory `helpers`' scratch spaces take.
# >
# > **What you need:** chapter 08, no GPU, and 4 GB of free memory. Reading takes {reading time},
# > running about half a minute.

# %%
from helpers.plotting import bars, show
from helpers.timing import in_new_processes

# %% [markdown]
# ## Stage by stage
#
# Which part of the memory grows with the images? A new process trains two steps, and asks the
# C library after each stage how much is allocated. `initialize` makes *weights and gradients*; then
# come the *first passes*, forward and backward; the first `trainer.step` makes the *store*
# (chapter 07).

# %% tags=["fold", "trains"]
# define: measure_memory(num_devices, shard), MB that each stage adds, in a new process
def memory_by_stage(setting):
    import os

    os.environ["MXNET_CPU_TEMP_COPY"] = str(setting["scratch_spaces"])  # read by MXNet's import

    import mxnet as mx
    from helpers.memory import allocated
    from helpers.networks import hybrid_resnet18
    from mxnet import autograd, gluon, init, np, npx

    npx.set_np()
    cpus = [mx.cpu(number) for number in range(setting["devices"])]
    shard = setting["shard"]
    net = hybrid_resnet18(10)
    net.hybridize(static_alloc=True, static_shape=True)
    entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    shards = [(np.zeros((shard, 1, 28, 28), ctx=cpu), np.zeros(shard, ctx=cpu)) for cpu in cpus]
    net.infer_shape(shards[0][0])
    added = {}
    last = 0

    def look(stage):
        nonlocal last
        npx.waitall()
        now = allocated() / 1e6
        added[stage] = now - last
        last = now

    look("before")
    net.initialize(init.Zero(), ctx=cpus)  # Xavier's would take more for a while
    look("weights and gradients")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    for number in range(setting["steps"]):
        with autograd.record():
            losses = [entropy(net(x), y) for x, y in shards]
        autograd.backward(losses)
        if number == 0:
            look("first passes")
        trainer.step(len(cpus) * shard)
        if number == 0:
            look("store")
    look("later steps")
    return added


def measure_memory(num_devices, shard, scratch_spaces=1, steps=2):
    setting = {"devices": num_devices, "shard": shard,
               "scratch_spaces": scratch_spaces, "steps": steps}
    (added,) = in_new_processes(memory_by_stage, [setting])
    return added

# %% tags=["measured"]
memory = {}  # MB by images and stage
for shard in [8, 16, 24]:
    images = 2 * shard
    memory[images] = measure_memory(num_devices=2, shard=shard)

print("MB on two devices  weights, gradients  first passes  store")
for images, added in memory.items():
    print(f"{images} images {added['weights and gradients']:27.0f} {added['first passes']:13.0f} "
          f"{added['store']:6.0f}")

# %% [markdown]
# What should it be? The weights of one replica are 11,175,818 numbers of 4 bytes. On $k$ devices
# weights and gradients take $2k$ times that. The store needs a buffer for each device's gradient
# and, as it makes the update, its own copy of the weights: $k + 1$ times. **Predict:** how many
# times is that for three devices?

# %%
weights = 4 * 11_175_818 / 1e6  # MB
print(f"weights of one replica: {weights:.0f} MB")
on_two = memory[32]
on_three = measure_memory(num_devices=3, shard=8)
for k, added in [(2, on_two), (3, on_three)]:
    both = added["weights and gradients"] / weights
    store = added["store"] / weights
    print(f"{k} devices: weights and gradients take {both:.1f} times that, the store {store:.1f}")

# %% [markdown]
# Only the passes grow much with the images. By how much? From 16 and 32 images we predict what 48
# take:

# %% tags=["measured"]
passes_16 = memory[16]["first passes"]
passes_32 = memory[32]["first passes"]
passes_48 = memory[48]["first passes"]
per_image = (passes_32 - passes_16) / (32 - 16)
for_no_image = passes_16 - 16 * per_image
predicted = for_no_image + 48 * per_image
print(f"each image takes {per_image:.1f} MB, and {for_no_image:.0f} MB don't depend on images")
print(f"48 images: {predicted:.0f} MB predicted, {passes_48:.0f} MB measured")

# %% tags=["fold"]
# check: weights and gradients are 2 k times, the store k + 1; the second step adds nothing
for k, added in [(2, memory[16]), (2, memory[32]), (2, memory[48]), (3, on_three)]:
    assert abs(added["weights and gradients"] / weights - 2 * k) < 0.05, k
    assert abs(added["store"] / weights - (k + 1)) < 0.05, k
    assert abs(added["later steps"]) < 0.01 * added["first passes"], "it grows"
assert abs(predicted / passes_48 - 1) < 0.05, "the passes of 48 images"
assert for_no_image > 0, "and something whatever the batch"

# %% [markdown]
# With one scratch space the second step adds nothing. But one part is our own doing: the scratch
# spaces. Each grows to what its largest borrower asks for (`src/resource.cc`, 1.9.1). MXNet has 4
# for all CPU devices. Above we took 1; `helpers` asks for 64, so that simulated devices wait for
# one another less than with 4 (deeper: How the speed-up was measured). What do they take? (With 64
# memory grows for some steps, so there we take four steps.)

# %% tags=["fold"]
# draw: memory of two devices with 32 images, and what 64 scratch spaces take more than one
added = memory[32]
many = measure_memory(2, 16, scratch_spaces=64, steps=4)  # the spaces grow for some steps
kept = added["weights and gradients"] + added["first passes"] + added["store"]
scratch = sum(many.values()) - many["before"] - kept - added["later steps"]
parts = {"weights,\ngradients": added["weights and gradients"], "store": added["store"],
         "passes of\n32 images": added["first passes"], "64 scratch spaces\ninstead of 1": scratch}
fig, ax = bars("Scratch spaces take most of the memory, and we asked for them", "MB", parts)
for place, megabytes in enumerate(parts.values()):
    ax.text(place, megabytes, f"{megabytes:.0f}", ha="center", va="bottom")
ax.set_ylim(0, 1.15 * scratch)
show(fig, alt="Four bars of memory on two devices: weights and gradients, the store, the passes of "
     "32 images, and what 64 scratch spaces take more than one, which is the highest.")
assert scratch > kept, "scratch spaces should take most"
assert added["first passes"] > added["weights and gradients"], "the second largest part"

# %% [markdown]
# Weights, gradients and store hardly grow with the images: **what grows with them is the passes**.
# (How the scratch spaces grow with them we haven't measured.) **On GPUs** each device has one
# scratch space (same file); whether it grows we haven't measured.
#
# ## Summary
#
# - Weights and gradients on $k$ devices take $2k$ times the weights (two and three devices, plain
#   SGD), and the store $k + 1$ times.
# - The passes take an amount that grows with the images.
# - Scratch space is the largest part here, because `helpers` asks for 64 of them.
