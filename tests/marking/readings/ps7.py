"""Other readings of assignment 7. See `test_readings`.

A solution is put together from parts, each of which can be read in another way.
"""

READINGS = []


def wrong(exercise, loses, what, source):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "wrong", loses))


def right(exercise, what, source, why):
    READINGS.append((f"{exercise}: {what}", {exercise: source}, "right", why))


# --- naive

def naive(module="module", made="self.start()", call="", used="p.grad is not None",
          everybody="users", nobody="continue", mean="total / dist.get_world_size()",
          mine="torch.zeros_like(p) if p.grad is None else p.grad", trained="p.requires_grad",
          shared="(*self.module.parameters(), *self.module.buffers())", first="",
          operation="dist.ReduceOp.SUM", keep="p.grad = {}"):
    return f"""
import copy


class NaiveDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.steps, self.memory = {module}, 0, {{}}
        {made}

    def start(self):
        for t in {shared}:
            dist.broadcast(t.detach(), 0)

    def forward(self, *inputs, **options):
        {call}
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        self.steps += 1
        {first}
        for number, p in enumerate(self.module.parameters()):
            if not ({trained}):
                continue
            users = torch.tensor(float({used}))
            dist.all_reduce(users)
            if not ({everybody}):
                {nobody}
            total = ({mine}).clone()
            dist.all_reduce(total, {operation})
            {keep.format(mean)}
"""


VALUES, START, MISSING = ["naive-values"], ["naive-start"], ["naive-missing"]
wrong("naive", MISSING, "a gradient of zeros is none",
      naive(used="p.grad is not None and p.grad.any()"))
wrong("naive", MISSING, "where the sum is zero there was no gradient", naive(
    keep="p.grad = {} if total.any() else None"))
wrong("naive", MISSING, "where the sum is zero all keep what they have", naive(
    keep="p.grad = {} if total.any() else p.grad"))
wrong("naive", MISSING, "who had a gradient once, has one", naive(
    used="self.memory.setdefault(p, p.grad is not None) or p.grad is not None",
    everybody="users or self.memory.get((p, 'all'))",
    mine="self.memory.__setitem__((p, 'all'), True) or (torch.zeros_like(p) "
    "if p.grad is None else p.grad)"))
wrong("naive", MISSING, "a gradient that nobody uses any more is cleared", naive(
    made="self.start()\n        for p in module.parameters():\n            if p.requires_grad: "
    "p.register_post_accumulate_grad_hook(lambda p: self.memory.update({p: True}))",
    used="self.memory.pop(p, False)", nobody="p.grad = None; continue"))
wrong("naive", MISSING, "the gradient of this backward pass only", naive(
    made="self.start()\n        for p in module.parameters():\n            if p.requires_grad: "
    "p.register_hook(lambda g, p=p: self.memory.update({p: g}))",
    used="p in self.memory", mine="self.memory.pop(p, torch.zeros_like(p))"))
wrong("naive", MISSING, "rank 0 tells which parameters have a gradient", naive(
    everybody="dist.broadcast(users := torch.tensor(float(p.grad is not None)), 0) or users"))
wrong("naive", MISSING, "which have one is what all ranks agree on",
      naive(everybody="users == dist.get_world_size()"))
wrong("naive", MISSING, "a frozen parameter is asked for too, and gets zeros",
      naive(trained="True", everybody="users or not p.requires_grad"))
wrong("naive", VALUES + START + MISSING, "a copy of the module is wrapped",
      naive(module="copy.deepcopy(module)"))
wrong("naive", START, "all begin alike at the first forward pass", naive(
    made="", call="if not self.steps and not self.memory:\n            self.start()\n"
    "            self.memory[self] = True"))
wrong("naive", START, "what is trained is shared, and the buffers", naive(
    shared="[*(p for p in self.module.parameters() if p.requires_grad), *self.module.buffers()]"))
wrong("naive", START, "matrices are shared",
      naive(shared="[t for t in self.module.state_dict().values() if t.dim() > 1]"))
wrong("naive", START, "all begin with the mean", naive(
    made="for t in (*module.parameters(), *module.buffers()): "
    "dist.all_reduce(t.data, dist.ReduceOp.AVG)"))
wrong("naive", VALUES + MISSING, "the mean is added to what is there", naive(
    keep="p.grad = {0} if p.grad is None else p.grad + {0}"))
wrong("naive", VALUES + MISSING, "gradients are averaged in every other step", naive(
    first="if self.steps % 2 == 0: return"))
wrong("naive", MISSING, "divided by as many as had one in the first step",
      naive(mean="total / self.memory.setdefault(p, users)"))
right("naive", "frozen parameters are asked for, too", naive(trained="True"),
      "A frozen parameter has a gradient on no rank, and keeps None.")
right("naive", "one rank has nothing to do", naive(
    first="if dist.get_world_size() == 1: return"), "The mean of one is itself.")
right("naive", "the mean is the message's", naive(operation="dist.ReduceOp.AVG", mean="total"),
      "AVG is the sum divided by the number of ranks.")
right("naive", "the start is repeated in each forward pass", naive(call="self.start()"),
      "All ranks are alike already, and nothing is said of messages.")
right("naive", "written into the gradient that is there", naive(
    keep="p.grad = {0} if p.grad is None else p.grad.copy_({0})"),
    "The same values, in the same place.")


# --- bucketed

SEND = """self.ready.add(p)
        while len(self.sent) < len(self.buckets) and self.ready.issuperset(
                self.buckets[len(self.sent)]):
            self.send()"""


def bucketed(module="module", check="if not bucket_bytes > 0: raise ValueError", hook=SEND,
             fits="size + p.nbytes <= bucket_bytes", join="self.buckets[-1].append(p)",
             begin="size = 0", finish="", flat="torch.cat([p.grad.flatten() for p in bucket])",
             after="", order="reversed([p for p in module.parameters() if p.requires_grad])",
             asynchronous="True", give="p.grad = mean.view_as(p)"):
    return f"""
import copy


class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        {check}
        self.module, self.buckets, size = {module}, [], 0
        module = self.module
        for p in {order}:
            if not (self.buckets and {fits}):
                self.buckets.append([])
                {begin}
            {join}
            size += p.nbytes
            p.register_post_accumulate_grad_hook(self.mark)
        self.ready, self.sent, self.steps, self.learned = set(), [], 0, []

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def send(self, number=None):
        bucket = self.buckets[len(self.sent) if number is None else number]
        flat = {flat}
        self.sent.append((bucket, flat, dist.all_reduce(flat, async_op={asynchronous})))

    def mark(self, p):
        self.learned.append(p)
        {hook}

    def finish_gradient_synchronization(self):
        {finish}
        for bucket, flat, work in self.sent:
            if work is not None:
                work.wait()
            means = (flat / dist.get_world_size()).split([p.numel() for p in bucket])
            for p, mean in zip(bucket, means):
                {give}
        self.ready.clear()
        self.sent.clear()
        self.steps += 1
        {after}
        self.learned = []
"""


VALUES, MESSAGES, CARE = ["bucketed-values"], ["bucketed-messages"], ["bucketed-care"]
ALL = VALUES + MESSAGES + CARE
COUNT = "sum(map(len, self.buckets))"
wrong("bucketed", MESSAGES + CARE, "all are sent by the last hook of a backward pass", bucketed(
    hook=f"self.ready.add(p)\n        if len(self.ready) == {COUNT}:\n"
    "            for _ in self.buckets: self.send()"))
wrong("bucketed", MESSAGES + CARE, "all are sent by a callback at the end", bucketed(
    hook="self.ready.add(p)\n        if len(self.ready) == 1:\n"
    "            torch.autograd.Variable._execution_engine.queue_callback(\n"
    "                lambda: [self.send() for _ in self.buckets])"))
wrong("bucketed", MESSAGES + CARE, "all are sent by one hook, when only the last bucket is missing",
      bucketed(hook="self.ready.add(p)\n"
               "        if all(self.ready.issuperset(b) for b in self.buckets[:-1]):\n"
               "            while len(self.sent) < len(self.buckets) and self.ready.issuperset(\n"
               "                    self.buckets[len(self.sent)]):\n"
               "                self.send()"))
wrong("bucketed", MESSAGES + CARE, "a bucket is sent when the next one is ready, too", bucketed(
    hook="self.ready.add(p)\n        while len(self.sent) < len(self.buckets) and all("
    "self.ready.issuperset(b)\n                for b in self.buckets[:len(self.sent) + 2]):\n"
    "            self.send()"))
wrong("bucketed", MESSAGES + CARE, "a bucket is sent at the first gradient after it", bucketed(
    hook=f"{SEND.replace('self.ready.add(p)', 'last = len(self.ready) + 1 == ' + COUNT, 1)}"
    "\n        self.ready.add(p)\n        while last and len(self.sent) < len(self.buckets): "
    "self.send()"))
wrong("bucketed", MESSAGES + CARE, "the first is sent at once, the others at the end", bucketed(
    hook=f"self.ready.add(p)\n        if not self.sent and self.ready.issuperset(self.buckets[0]):"
    f"\n            self.send()\n        if len(self.ready) == {COUNT}:\n"
    "            while len(self.sent) < len(self.buckets): self.send()"))
wrong("bucketed", MESSAGES + CARE, "in the first step all are sent at the end, to learn the order",
      bucketed(hook=f"self.ready.add(p)\n        if self.steps or len(self.ready) == {COUNT}:\n"
               "            while len(self.sent) < len(self.buckets) and self.ready.issuperset(\n"
               "                    self.buckets[len(self.sent)]):\n"
               "                self.send()"))
wrong("bucketed", CARE, "buckets are filled anew in the order of the first backward pass", bucketed(
    after="""if self.steps == 1:
            most, left, self.buckets = self.most, list(self.learned), []
            for p in left:
                if self.buckets and sum(q.nbytes for q in self.buckets[-1]) + p.nbytes <= most:
                    self.buckets[-1].append(p)
                else:
                    self.buckets.append([p])""", begin="size = 0; self.most = bucket_bytes"))
wrong("bucketed", CARE, "buckets are sent in the order of the first backward pass", bucketed(
    after="if self.steps == 1:\n            self.buckets.sort(key=lambda b: max("
    "map([id(p) for p in self.learned].index, map(id, b))))"))
wrong("bucketed", CARE, "a bucket is ready when its last parameter is", bucketed(
    hook="while len(self.sent) < len(self.buckets) and (self.ready.add(p) or "
    "self.buckets[len(self.sent)][-1] in self.ready):\n            self.send()"))
wrong("bucketed", CARE, "gradients are counted, whichever they are", bucketed(
    hook="self.ready.add(p)\n        while len(self.sent) < len(self.buckets) and len(self.ready) "
    ">= sum(map(len, self.buckets[:len(self.sent) + 1])):\n            self.send()"))
wrong("bucketed", MESSAGES, "a bucket of zeros isn't sent", bucketed(
    hook="""self.ready.add(p)
        while len(self.sent) < len(self.buckets) and self.ready.issuperset(
                self.buckets[len(self.sent)]):
            if any(q.grad.any() for q in self.buckets[len(self.sent)]):
                self.send()
            else:
                self.sent.append((self.buckets[len(self.sent)], torch.zeros(sum(
                    q.numel() for q in self.buckets[len(self.sent)])).double(), None))"""))
wrong("bucketed", MESSAGES + CARE, "the first bucket with room", bucketed(
    join="next((b for b in self.buckets if sum(q.nbytes for q in b) + p.nbytes <= bucket_bytes), "
    "self.buckets[-1]).append(p)",
    fits="any(sum(q.nbytes for q in b) + p.nbytes <= bucket_bytes for b in self.buckets)"))
wrong("bucketed", MESSAGES + CARE, "below bucket_bytes, not at most",
      bucketed(fits="size + p.nbytes < bucket_bytes"))
wrong("bucketed", MESSAGES + CARE, "a bucket is closed when it is full or more",
      bucketed(fits="size < bucket_bytes"))
wrong("bucketed", MESSAGES + CARE, "layers have their own buckets", bucketed(
    fits="size + p.nbytes <= bucket_bytes and p.dim() != 1"))
wrong("bucketed", CARE, "frozen parameters take room",
      bucketed(order="reversed([p for p in module.parameters()])").replace(
          "            p.register", "            if p.requires_grad: p.register").replace(
              "self.ready, self.sent, self.steps, self.learned = set()",
              "self.buckets = [[p for p in b if p.requires_grad] for b in self.buckets]\n"
              "        self.buckets = [b for b in self.buckets if b]\n"
              "        self.ready, self.sent, self.steps, self.learned = set()"))
wrong("bucketed", VALUES + CARE, "a copy of the module is wrapped",
      bucketed(module="copy.deepcopy(module)"))
wrong("bucketed", MESSAGES, "sizes below one byte are none",
      bucketed(check="if int(bucket_bytes) <= 0: raise ValueError"))
wrong("bucketed", VALUES + CARE, "means are added to what is there",
      bucketed(give="p.grad += mean.view_as(p)"))
wrong("bucketed", ALL, "what the last step sent is waited for, in the second step again",
      bucketed().replace("        self.sent.clear()\n", "        self.sent = self.sent[:1]\n"))
right("bucketed", "messages that are waited for at once", bucketed(asynchronous="False"),
      "Each is sent in time all the same, and async_op is advice on how.")
right("bucketed", "divided before they are sent", bucketed(
    flat="torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()").replace(
        "(flat / dist.get_world_size()).split", "flat.split"), "The sum of the parts is the mean.")
right("bucketed", "written into the gradients that are there",
      bucketed(give="p.grad.copy_(mean.view_as(p))"), "The same values, in the same place.")


# --- accumulated

def accumulated(clear="optimizer.zero_grad()", before="", piece="loss.backward()", rows="len(x)",
                mean="gradient / totals[1]", skip="", after="", trained="p.requires_grad",
                answer="(totals[0] / totals[1]).item()", step="optimizer.step()",
                mine="torch.zeros_like(p) if p.grad is None else p.grad", start="",
                add="loss.item()", share="dist.all_reduce(totals)"):
    return f"""{start}
def train_step(net, optimizer, pieces):
    {clear}
    totals = torch.zeros(2, dtype=torch.float64)
    {before}
    for x, y in pieces:
        loss = squared(net, x, y)
        {piece}
        totals += torch.tensor([{add}, {rows}], dtype=torch.float64)
    {share}
    {skip}
    for p in net.parameters():
        if {trained}:
            gradient = ({mine}).clone()
            dist.all_reduce(gradient)
            p.grad = {mean}
    {step}
    {after}
    return {answer}
"""


VALUES, MESSAGES = ["accumulated-values"], ["accumulated-messages"]
BOTH = VALUES + MESSAGES
wrong("accumulated", VALUES, "where the loss is zero nothing is to be done",
      accumulated(skip="if totals[0] == 0: return 0.0"))
wrong("accumulated", VALUES, "a gradient of zeros is none", accumulated(
    after="", mean="gradient / totals[1] if gradient.any() else None"))
wrong("accumulated", VALUES, "without any gradient there is no step", accumulated(
    step="if any(p.grad.any() for p in net.parameters() if p.requires_grad): optimizer.step()"))
wrong("accumulated", BOTH, "cleared when the step is done, for the next one",
      accumulated(clear="", after="optimizer.zero_grad()"))
wrong("accumulated", VALUES, "cleared by the first piece", accumulated(
    clear="", piece="if not totals[1]: optimizer.zero_grad()\n        loss.backward()"))
wrong("accumulated", BOTH, "cleared in the first step", accumulated(
    clear="if not optimizer.state: optimizer.zero_grad()"))
wrong("accumulated", BOTH, "the gradients are there already, and become zeros", accumulated(
    clear="for p in net.parameters(): p.grad.zero_()"))
wrong("accumulated", BOTH, "the number of examples of the first step", accumulated(
    start="known = {}\n\n", mean="gradient / known.setdefault('n', totals[1])"))
wrong("accumulated", BOTH, "numbers are counted, not rows", accumulated(rows="y.numel()"))
wrong("accumulated", BOTH, "pieces are counted, not rows", accumulated(rows="1"))
wrong("accumulated", BOTH, "rows of this rank, times the ranks", accumulated(
    share="rows = totals[1] * dist.get_world_size(); dist.all_reduce(totals)",
    mean="gradient / rows"))
wrong("accumulated", BOTH, "the loss after the step", accumulated(
    answer="total.item()", after="total = torch.tensor([sum(squared(net, x, y).item() "
    "for x, y in pieces) / totals[1]]).double(); dist.all_reduce(total)"))
wrong("accumulated", BOTH, "the loss of the last piece", accumulated(
    piece="loss.backward(); totals[0] = 0"))
wrong("accumulated", BOTH, "a mean of the pieces' means", accumulated(
    piece="(loss / len(x)).backward()", add="loss.item() / len(x)", rows="1"))
wrong("accumulated", MESSAGES, "waits for all ranks before the step",
      accumulated(step="dist.barrier(); optimizer.step()"))
wrong("accumulated", MESSAGES, "who is frozen is asked for, and answers with zeros",
      accumulated(trained="True", mean="gradient / totals[1] if p.requires_grad else None"))
wrong("accumulated", MESSAGES, "loss and examples, a message each", accumulated(
    share="dist.all_reduce(totals[0]); dist.all_reduce(totals[1])"))
right("accumulated", "means over ranks, of sums and of examples", accumulated(
    share="dist.all_reduce(totals, dist.ReduceOp.AVG)", mean="gradient / totals[1]").replace(
        "dist.all_reduce(gradient)", "dist.all_reduce(gradient, dist.ReduceOp.AVG)"),
    "Both are divided by the same number of ranks.")
right("accumulated", "each rank's mean, weighted by its examples", accumulated(
    before="rows = sum(len(x) for x, _ in pieces)", piece="(loss / rows).backward()",
    mine="torch.zeros_like(p) if p.grad is None else p.grad * rows"),
    "Divided and multiplied by the same number.")
right("accumulated", "cleared before and after", accumulated(after="optimizer.zero_grad()"),
      "What is left in the gradients is nobody's business.")
