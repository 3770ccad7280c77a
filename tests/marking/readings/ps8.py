"""Other readings of assignment 8. See `test_readings`.

A solution is put together from parts, each of which can be read in another way.
"""

READINGS = []


def wrong(exercise, loses, what, source):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "wrong", loses))


def right(exercise, what, source, why):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "right", why))


# --- sharded

def sharded(params="list(params)", empty="not self.params", gradient="torch.zeros_like(p) "
            "if p.grad is None else p.grad", before="", update="self.inner.step()", after="",
            clear="p.grad = None", part="flat.chunk(k)[dist.get_rank()].clone()", pad="0",
            flat="tensor.detach().flatten()", mean="total / dist.get_world_size()", made="",
            order="self.params"):
    return f"""
class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **options):
        self.params = {params}
        if {empty}:
            raise ValueError("no parameters")
        k, self.steps, self.memory = dist.get_world_size(), 0, {{}}
        flat = self.flatten([p for p in {order}])
        self.shard = {part}
        self.inner = optimizer_class([self.shard], **options)
        {made}

    def flatten(self, tensors, pad=0):
        flat = torch.cat([{flat} for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % dist.get_world_size()), value=pad)

    @torch.no_grad()
    def step(self):
        self.steps += 1
        {before}
        flat = self.flatten([{gradient} for p in {order}], {pad})
        total = torch.empty_like(self.shard)
        dist.reduce_scatter_single(total, flat)
        self.shard.grad = {mean}
        {update}
        dist.all_gather_single(flat, self.shard)
        begin = 0
        for p in {order}:
            p.copy_(flat[begin:begin + p.numel()].view_as(p))
            begin += p.numel()
        {after}

    def zero_grad(self):
        for p in self.params:
            {clear}
"""


VALUES, MESSAGES, CARE = ["sharded-values"], ["sharded-messages"], ["sharded-care"]
ALL = VALUES + MESSAGES + CARE
NONE = "all(p.grad is None for p in self.params)"
wrong("sharded", VALUES, "without any gradient there is no step",
      sharded(before=f"if {NONE}: return"))
wrong("sharded", VALUES, "without any gradient since the start there is no step", sharded(
    before=f"if {NONE} and not self.memory: return\n        self.memory[0] = True"))
wrong("sharded", VALUES + CARE, "a shard without a gradient isn't updated",
      sharded(update="if total.any(): self.inner.step()"))
wrong("sharded", VALUES, "numbers without a gradient aren't updated", sharded(
    update="old = self.shard.clone(); self.inner.step(); self.shard[total == 0] = old[total == 0]"))
wrong("sharded", VALUES, "a parameter that nobody has used so far is left alone", sharded(
    before="old = [p.clone() for p in self.params]",
    after="for p, last in zip(self.params, old):\n            if p.grad is not None: "
    "self.memory[p] = True\n            if p not in self.memory: p.copy_(last)"))
wrong("sharded", VALUES + CARE, "the gradient of the step before, where there is none", sharded(
    gradient="self.memory.get(p, torch.zeros_like(p)) if p.grad is None else "
    "self.memory.setdefault(p, p.grad.clone())"))
wrong("sharded", CARE, "None becomes zeros, in the parameter", sharded(
    before="for p in self.params:\n            p.grad = torch.zeros_like(p) "
    "if p.grad is None else p.grad"))
wrong("sharded", CARE, "each rank keeps its part of the mean, in its parameters", sharded(
    before="for p in self.params:\n            if p.grad is not None: "
    "p.grad /= dist.get_world_size()", mean="total"))
wrong("sharded", CARE, "cleared when the step is done", sharded(
    after="self.zero_grad()"))
wrong("sharded", CARE, "the caller's list is used up",
      sharded(params="[params.pop(0) for _ in list(params)] if type(params) is list "
              "else list(params)"))
wrong("sharded", CARE, "an iterator, never a list",
      sharded(params="[next(params), *params]"))
wrong("sharded", ALL, "a list, never an iterator",
      sharded(params="[params[i] for i in range(len(params))]"))
wrong("sharded", CARE, "padding with ones", sharded(pad="1"))
wrong("sharded", CARE, "numbers are dealt out in turn",
      sharded(part="flat[dist.get_rank()::k].clone()").replace(
          "reduce_scatter_single(total, flat)",
          "reduce_scatter_single(total, flat.view(len(self.shard), -1).T.flatten())").replace(
              "all_gather_single(flat, self.shard)", "all_gather_single(flat, self.shard); "
              "flat = flat.view(-1, len(self.shard)).T.flatten()"))
wrong("sharded", CARE, "parameters in reverse order", sharded(order="self.params[::-1]"))
wrong("sharded", CARE, "column by column", sharded(
    flat="tensor.detach().permute([*range(tensor.dim())][::-1]).flatten()").replace(
        "view_as(p))", "view(p.shape[::-1]).permute([*range(p.dim())][::-1]))"))
wrong("sharded", CARE, "rank 0 has the last shard",
      sharded(part="flat.chunk(k)[-1 - dist.get_rank()].clone()").replace(
          "reduce_scatter_single(total, flat)",
          "reduce_scatter_single(total, flat.view(dist.get_world_size(), -1).flip(0).flatten())"
      ).replace("all_gather_single(flat, self.shard)", "all_gather_single(flat, self.shard); "
                "flat = flat.view(dist.get_world_size(), -1).flip(0).flatten()"))
wrong("sharded", CARE, "the shard without its padding is updated", sharded(
    made="left = sum(p.numel() for p in self.params) - dist.get_rank() * len(self.shard); "
    "self.inner = optimizer_class([self.shard[:max(left, 0)]], **options)",
    update="self.inner.param_groups[0]['params'][0].grad = "
    "self.shard.grad[:len(self.inner.param_groups[0]['params'][0])]; self.inner.step()"))
wrong("sharded", MESSAGES, "one rank has nothing to send", sharded(
    before="if dist.get_world_size() == 1:\n            self.shard.grad = self.flatten("
    "[torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])\n"
    "            self.inner.step()\n            begin = 0\n            for p in self.params:\n"
    "                p.copy_(self.shard[begin:begin + p.numel()].view_as(p))\n"
    "                begin += p.numel()\n            return"))
wrong("sharded", VALUES + CARE, "new values are gathered at the next step", sharded(
    before="").replace("dist.all_gather_single(flat, self.shard)\n",
                       "old, self.old = getattr(self, 'old', self.shard.clone()), "
                       "self.shard.clone()\n        dist.all_gather_single(flat, old)\n"))
right("sharded", "the message takes the mean", sharded(mean="total").replace(
    "single(total, flat)", "single(total, flat, op=dist.ReduceOp.AVG)"),
    "AVG is the sum divided by the number of ranks.")
right("sharded", "gradients are divided before they are sent", sharded(
    mean="total", flat="tensor.detach().flatten()").replace(
        "single(total, flat)", "single(total, flat / dist.get_world_size())"),
    "The sum of the parts is the mean.")
right("sharded", "nobody looks whether there is a parameter", sharded(empty="False"),
      "torch.cat of no tensors raises ValueError by itself.")
right("sharded", "cleared to zeros, None too", sharded(clear="p.grad = torch.zeros_like(p)"),
      "To zeros or to None, as you like.")


# --- linear

def linear(keep="", kept="", forward="F.linear(x, weight, bias)", save="ctx.save_for_backward(x)",
           saved="(x,) = ctx.saved_tensors", part=".clone()", made="", unshard="", world="",
           needs="ctx.needs_input_grad", mean="flat / dist.get_world_size()", before="",
           reduce="dist.reduce_scatter_single(of_shard, mean)", give="of_shard"):
    """keep: what the forward pass does with the whole. kept: what the backward pass does, there."""
    return f"""
def count(tensors):
    return sum(t.numel() for t in tensors)


class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.shapes = [p.shape for p in linear.parameters()]
        flat = self.flatten(linear.parameters())
        shard = flat.chunk(dist.get_world_size())[dist.get_rank()]{part}
        self.shard = nn.Parameter(shard)
        self.memory = {{}}
        {made}

    def flatten(self, tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % dist.get_world_size()))

    def unshard(self):
        weight, bias = self.gather()
        {unshard}
        return weight, bias

    def gather(self):
        {world}
        flat = self.shard.new_empty(len(self.shard) * dist.get_world_size())
        dist.all_gather_single(flat, self.shard.detach())
        sizes = [shape.numel() for shape in self.shapes]
        weight, *bias = [piece.view(shape) for piece, shape in zip(
            flat[:sum(sizes)].split(sizes), self.shapes)]
        return weight, bias[0] if bias else None

    def forward(self, x):
        {before}
        return Gathered.apply(x, self.shard, self)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, layer):
        weight, bias = layer.gather()
        ctx.layer = layer
        {save}
        {keep}
        return {forward}

    @staticmethod
    def backward(ctx, gradient):
        layer, of_x, of_shard = ctx.layer, None, None
        {saved}
        needs = {needs}
        if needs[0]:
            weight, bias = layer.gather()
            {kept}
            of_x = gradient @ weight
        if needs[1]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            parts = [rows.T @ x.reshape(-1, x.shape[-1]), rows.sum(0)]
            flat = layer.flatten(parts[:len(layer.shapes)])
            mean, of_shard = {mean}, torch.empty_like(layer.shard)
            {reduce}
        return of_x, {give} if needs[1] else None, None
"""


VALUES, MESSAGES, FORGETS = ["linear-values"], ["linear-messages"], ["linear-forgets"]
ALL = VALUES + MESSAGES + FORGETS
COPIES = {
    "in two halves": "[half.clone() for half in weight.chunk(2)]",
    "row by row": "[row.clone() for row in weight]",
    "number by number": "weight.flatten().tolist()",
    "in float32": "weight.float()",
    "in float32, in two halves": "[half.float() for half in weight.chunk(2)]",
    "in NumPy": "weight.numpy().copy()",
    "in NumPy, row by row": "[row.copy() for row in weight.numpy()]",
    "in Python's bytes": "weight.numpy().tobytes()"}
for what, copy in COPIES.items():
    wrong("linear", FORGETS, f"keeps a copy for the backward pass, {what}",
          linear(keep=f"ctx.whole = {copy}"))
for what in ("in float32", "in NumPy"):
    wrong("linear", FORGETS, f"keeps a copy in the layer from the backward pass on, {what}",
          linear(kept=f"layer.memory[0] = {COPIES[what]}"))
    wrong("linear", FORGETS, f"keeps a copy where there is no backward pass, {what}", linear(
        before="self.memory.clear(); self.off = not torch.is_grad_enabled()",
        keep=f"if layer.off: layer.memory[0] = {COPIES[what]}"))
    wrong("linear", FORGETS, f"unshard() keeps a copy, {what}",
          linear(unshard=f"self.memory[0] = {COPIES[what]}"))
    wrong("linear", FORGETS, f"keeps a copy from the start, {what}",
          linear(made=f"weight = linear.weight.detach(); self.memory[0] = {COPIES[what]}"))
wrong("linear", FORGETS, "keeps the other ranks' shards", linear(
    keep="flat = layer.flatten([t for t in (weight, bias) if t is not None]); ctx.whole = "
    "[s.clone() for s in flat.chunk(dist.get_world_size())]"))
wrong("linear", FORGETS, "the message lands in memory that stays", linear(
    world="self.flat = getattr(self, 'flat', None)").replace(
        "flat = self.shard.new_empty(len(self.shard) * dist.get_world_size())",
        "if self.flat is None: self.flat = self.shard.new_empty("
        "len(self.shard) * dist.get_world_size())\n        flat = self.flat"))
wrong("linear", VALUES, "x of the latest pass, in the layer", linear(
    save="layer.x = x", saved="x = layer.x"))
wrong("linear", VALUES + MESSAGES, "x of the first pass, in the layer",
      linear(save="layer.memory.setdefault(0, x)", saved="x = layer.memory[0]"))
wrong("linear", MESSAGES, "what needs a gradient is what needed one first", linear(
    needs="layer.memory.setdefault('needs', ctx.needs_input_grad)"))
wrong("linear", MESSAGES, "x needs a gradient if one needed it before", linear(
    needs="(layer.memory.setdefault('x', ctx.needs_input_grad[0]) or ctx.needs_input_grad[0], "
    "ctx.needs_input_grad[1])", give="of_shard").replace(
        "return of_x, ", "return of_x if ctx.needs_input_grad[0] else None, "))
wrong("linear", VALUES, "the mean over ranks of all that has come", linear(
    mean="flat / dist.get_world_size()", give="(of_shard if layer.shard.grad is None else "
    "(of_shard - layer.shard.grad) / 2)"))
wrong("linear", VALUES, "the gradient replaces what is there", linear(
    reduce="dist.reduce_scatter_single(of_shard, mean); layer.shard.grad = None"))
wrong("linear", VALUES, "x gets the mean of all ranks' gradients", linear(
    kept="gradient = gradient / dist.get_world_size()"))
wrong("linear", MESSAGES, "reduces what is zero without a message", linear(
    reduce="if mean.any(): dist.reduce_scatter_single(of_shard, mean)\n"
    "            else: of_shard.zero_()"))
wrong("linear", MESSAGES, "one rank has nothing to gather", linear(
    world="if dist.get_world_size() == 1:\n            sizes = [s.numel() for s in self.shapes]\n"
    "            parts = [t.view(s) for t, s in zip(self.shard.detach().clone().split(sizes), "
    "self.shapes)]\n            return (*parts, None)[:2]"))
wrong("linear", ALL, "unshard() returns what the last pass gathered", linear(
    keep="layer.memory[0] = weight, bias").replace(
        "weight, bias = self.gather()\n        \n", "weight, bias = self.memory[0]\n"))
wrong("linear", MESSAGES, "unshard() gathers weight and bias, a message each", linear(
    unshard="self.gather()"))
right("linear", "a copy of the shard for the backward pass",
      linear(keep="ctx.mine = shard.detach().clone()"), "Its shard it may keep.")
right("linear", "a copy of x for the backward pass", linear(
    save="ctx.x = x.detach().numpy().copy()", saved="x = torch.from_numpy(ctx.x)"),
    "x it may keep.")
right("linear", "the memory of the whole is given back, the tensor kept", linear(
    keep="ctx.whole = weight", forward="layer.finish(F.linear(x, weight, bias), weight)").replace(
        "    def gather(self):", "    def finish(self, y, weight):\n"
        "        weight.untyped_storage().resize_(0)\n        return y\n\n    def gather(self):"),
    "A tensor whose memory was given back keeps nothing, as FSDP does it.")
right("linear", "the sum is divided when it has come", linear(
    mean="flat", give="of_shard / dist.get_world_size()"), "The mean of the parts is their sum's.")


# --- memory

STAGE = "ranks < 1 or stage not in (0, 1, 2, 3)"
NUMBERS, LIMIT = (f"if {one} < 0 or {STAGE}: raise ValueError" for one in ("numbers", "limit"))


def memory(check=NUMBERS, early="", shard="-(-numbers // ranks)", check_most=LIMIT, early_most="",
           search=None, first="1 3 2"):
    """first: the stages that shard state, weights and gradients, and all after them."""
    state, weight, gradient = first.split()
    search = search or """low, high = 0, limit * ranks + 1
    while high - low > 1:
        middle = (low + high) // 2
        if memory(middle, ranks, stage) <= limit:
            low = middle
        else:
            high = middle
    return low"""
    return f"""
def memory(numbers, ranks, stage):
    {early}
    {check}
    shard = {shard}
    return (12 * (shard if stage >= {state} else numbers)
            + 2 * (shard if stage >= {weight} else numbers)
            + 2 * (shard if stage >= {gradient} else numbers))


def most(limit, ranks, stage):
    {early_most}
    {check_most}
    {search}
"""


BYTES, MOST = ["memory-bytes"], ["memory-most"]
BOTH = BYTES + MOST
wrong("memory", BYTES, "no numbers take nothing, whatever else is said",
      memory(early="if numbers == 0: return 0"))
wrong("memory", BYTES, "one rank holds all, whatever the stage",
      memory(early="if ranks == 1 and numbers >= 0: return 16 * numbers"))
wrong("memory", BYTES, "in stage 0 nobody asks for the ranks",
      memory(early="if stage == 0 and numbers >= 0: return 16 * numbers"))
wrong("memory", BYTES, "below 0 is looked at where something is whole", memory(
    check=f"if {STAGE} or stage < 3 and numbers < 0: raise ValueError"))
wrong("memory", BYTES, "stages count from the end, too", memory(
    check=f"stage = [0, 1, 2, 3][stage] if -5 < stage < 4 else 9\n    {NUMBERS}"))
wrong("memory", MOST, "a limit of nothing is enough for nothing, whatever else is said",
      memory(early_most="if limit == 0: return 0"))
wrong("memory", MOST, "below one number's bytes there is nothing, whatever else is said",
      memory(early_most="if 0 <= limit < 16: return 0"))
wrong("memory", MOST, "one rank is told by a division, whatever the stage",
      memory(early_most="if ranks == 1: return limit // 16"))
wrong("memory", MOST, "in stage 0 nobody asks for the ranks, for a limit",
      memory(early_most="if stage == 0 and limit >= 0: return limit // 16"))
wrong("memory", MOST, "a limit below 0 is none",
      memory(check_most="memory(0, ranks, stage)", early_most="limit = max(limit, 0)"))
wrong("memory", MOST, "no more numbers than bytes",
      memory(search="low, high = 0, limit + 1\n    while high - low > 1:\n"
             "        middle = (low + high) // 2\n"
             "        low, high = (middle, high) if memory(middle, ranks, stage) <= limit "
             "else (low, middle)\n    return low"))
wrong("memory", MOST, "no model has more than 2**128 numbers", memory(
    search="low, high = 0, 2**128\n    while high - low > 1:\n        middle = (low + high) // 2\n"
    "        low, high = (middle, high) if memory(middle, ranks, stage) <= limit "
    "else (low, middle)\n    return low"))
FROM_FORMULA = """whole, shared = [(16, 0), (4, 12), (2, 14), (0, 16)][stage]
    count = limit // (whole * ranks + shared) * ranks
    {}
    return count"""
wrong("memory", MOST, "the last round is full or empty", memory(search=FROM_FORMULA.format("")))
wrong("memory", MOST, "one number more at most in the last round", memory(
    search=FROM_FORMULA.format("count += memory(count + 1, ranks, stage) <= limit")))
wrong("memory", MOST, "the search doubles, and then goes one by one for a hundred steps", memory(
    search="""count, step = 0, 1
    while memory(count + step, ranks, stage) <= limit:
        count, step = count + step, step * 2
    for _ in range(100):
        step = max(step // 2, 1)
        if memory(count + step, ranks, stage) <= limit: count += step
    return count"""))
wrong("memory", BOTH, "a shard by a factor, which rounds",
      memory(shard="__import__('math').ceil(numbers * (1 / ranks))"))
wrong("memory", BOTH, "a shard by a float's remainder",
      memory(shard="numbers // ranks + (numbers / ranks % 1 > 0)"))
right("memory", "stage 2 shards weights, stage 3 gradients, too", memory(first="1 2 3"),
      "A gradient has as many bytes as a weight.")
right("memory", "a limit of two hundred digits would do", memory(
    search="low, high = 0, 10**200 * ranks\n    while high - low > 1:\n"
    "        middle = (low + high) // 2\n"
    "        low, high = (middle, high) if memory(middle, ranks, stage) <= limit "
    "else (low, middle)\n    return low"), "Limits of fifty digits are asked for.")
right("memory", "the last round by a division", memory(search=FROM_FORMULA.format(
    "left = limit - memory(count, ranks, stage) - shared\n"
    "    if left >= 0: count += min(ranks - 1, left // whole if whole else ranks)")),
    "What is left after the next number's shards is divided by what a number takes whole.")
right("memory", "the errors of the other function", memory(
    check_most="memory(limit, ranks, stage)"), "Both refuse the same.")
