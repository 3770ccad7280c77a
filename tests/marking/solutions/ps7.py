# %% right naive: who has a gradient is one message, the rest are started together
class NaiveDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        with torch.no_grad():
            for t in list(module.parameters()) + list(module.buffers()):
                dist.broadcast(t, 0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        trained = [p for p in self.module.parameters() if p.requires_grad]
        users = torch.tensor([p.grad is not None for p in trained], dtype=torch.int64)
        dist.all_reduce(users)
        works = []
        for p, count in zip(trained, users.tolist()):
            if count:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad / dist.get_world_size()
                works.append(dist.all_reduce(p.grad, async_op=True))
        for work in works:
            work.wait()

# %% right naive: everything gathered, and the mean of what was
class NaiveDDP(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        state = [module.state_dict()]
        dist.broadcast_object_list(state, src=0)
        module.load_state_dict(state[0])

    def forward(self, *inputs, **named):
        return self.module(*inputs, **named)

    @torch.no_grad()
    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            if p.requires_grad:
                used = [None] * dist.get_world_size()
                dist.all_gather_object(used, p.grad is not None)
                if any(used):
                    mine = p.grad if p.grad is not None else torch.zeros_like(p)
                    parts = [torch.empty_like(p) for _ in used]
                    dist.all_gather(parts, mine.contiguous())
                    p.grad = torch.stack(parts).mean(0)

# %% right naive: by the largest flag, and sums divided by a constant
class NaiveDDP(nn.Module):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.ranks = module, dist.get_world_size()
        for group in (module.parameters, module.buffers):
            for t in group():
                whole = t.detach() if dist.get_rank() == 0 else torch.zeros_like(t).detach()
                dist.all_reduce(whole)
                t.data = whole.clone()

    def __call__(self, *inputs, **options):
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        for p in filter(lambda p: p.requires_grad, self.module.parameters()):
            there = torch.tensor(0 if p.grad is None else 1)
            dist.all_reduce(there, op=dist.ReduceOp.MAX)
            if there.item():
                total = torch.zeros_like(p) if p.grad is None else p.grad.clone()
                dist.all_reduce(total)
                p.grad = total / self.ranks

# %% right naive: reduce-scatter, then all-gather
class NaiveDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for t in [*module.buffers(), *module.parameters()]:
            dist.broadcast(t.data, 0)

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        k = dist.get_world_size()
        for p in self.module.parameters():
            if p.requires_grad:
                flat = torch.zeros(p.numel() + 1, dtype=p.dtype)
                if p.grad is not None:
                    flat[0], flat[1:] = 1, p.grad.flatten()
                flat = torch.nn.functional.pad(flat, (0, -len(flat) % k))
                mine = torch.empty(len(flat) // k, dtype=p.dtype)
                dist.reduce_scatter_single(mine, flat)
                dist.all_gather_single(flat, mine)
                if flat[0] > 0:
                    p.grad = (flat[1:p.numel() + 1] / k).view_as(p)

# %% right naive: frozen parameters are asked for, too
# A frozen parameter has a gradient on no rank, and keeps None.
import copy


class NaiveDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.steps, self.memory = module, 0, {}
        self.start()

    def start(self):
        for t in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(t.detach(), 0)

    def forward(self, *inputs, **options):

        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        self.steps += 1

        for number, p in enumerate(self.module.parameters()):
            if not (True):
                continue
            users = torch.tensor(float(p.grad is not None))
            dist.all_reduce(users)
            if not (users):
                continue
            total = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
            dist.all_reduce(total, dist.ReduceOp.SUM)
            p.grad = total / dist.get_world_size()

# %% right naive: one rank has nothing to do
# from frozen parameters are asked for, too
# The mean of one is itself.
#=         self.steps += 1
#+         if dist.get_world_size() == 1: return
#-             if not (True):
#+             if not (p.requires_grad):

# %% right naive: the mean is the message's
# from frozen parameters are asked for, too
# AVG is the sum divided by the number of ranks.
#-             if not (True):
#+             if not (p.requires_grad):
#-             dist.all_reduce(total, dist.ReduceOp.SUM)
#-             p.grad = total / dist.get_world_size()
#+             dist.all_reduce(total, dist.ReduceOp.AVG)
#+             p.grad = total

# %% right naive: the start is repeated in each forward pass
# from frozen parameters are asked for, too
# All ranks are alike already, and nothing is said of messages.
#=     def forward(self, *inputs, **options):
#+         self.start()
#-             if not (True):
#+             if not (p.requires_grad):

# %% right naive: written into the gradient that is there
# from frozen parameters are asked for, too
# The same values, in the same place.
#-             if not (True):
#+             if not (p.requires_grad):
#-             p.grad = total / dist.get_world_size()
#+             p.grad = total / dist.get_world_size() if p.grad is None else p.grad.copy_(total / dist.get_world_size())

# %% wrong naive loses naive-start: frozen parameters keep what they had | other values
class NaiveDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for t in (*module.parameters(), *module.buffers()):
            if t.requires_grad or t.dim() == 1 and t is module.shift:
                dist.broadcast(t.detach(), 0)
    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)
    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            if p.requires_grad:
                users = torch.tensor(float(p.grad is not None))
                dist.all_reduce(users)
                if users:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()

# %% wrong naive loses naive-values, naive-start, naive-missing: each rank broadcasts from itself | message 1 is
# from frozen parameters keep what they had
#-             if t.requires_grad or t.dim() == 1 and t is module.shift:
#-                 dist.broadcast(t.detach(), 0)
#+             dist.broadcast(t.detach(), dist.get_rank())

# %% wrong naive loses naive-missing: sends nothing where it has nothing | other values|message \d+ is|never comes from rank
class NaiveDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for t in (*module.parameters(), *module.buffers()):
            dist.broadcast(t.detach(), 0)
    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)
    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

# %% wrong naive loses naive-missing: a gradient of zeros is none
# from frozen parameters are asked for, too
#-             if not (True):
#+             if not (p.requires_grad):
#-             users = torch.tensor(float(p.grad is not None))
#+             users = torch.tensor(float(p.grad is not None and p.grad.any()))

# %% wrong naive loses naive-missing: who had a gradient once, has one
# from frozen parameters are asked for, too
#-             if not (True):
#+             if not (p.requires_grad):
#-             users = torch.tensor(float(p.grad is not None))
#+             users = torch.tensor(float(self.memory.setdefault(p, p.grad is not None) or p.grad is not None))
#-             if not (users):
#+             if not (users or self.memory.get((p, 'all'))):
#-             total = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
#+             total = (self.memory.__setitem__((p, 'all'), True) or (torch.zeros_like(p) if p.grad is None else p.grad)).clone()

# %% wrong naive loses naive-missing: the gradient of this backward pass only
# from frozen parameters are asked for, too
#=         self.start()
#+         for p in module.parameters():
#+             if p.requires_grad: p.register_hook(lambda g, p=p: self.memory.update({p: g}))
#-             if not (True):
#+             if not (p.requires_grad):
#-             users = torch.tensor(float(p.grad is not None))
#+             users = torch.tensor(float(p in self.memory))
#-             total = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
#+             total = (self.memory.pop(p, torch.zeros_like(p))).clone()

# %% wrong naive loses naive-missing: a frozen parameter is asked for too, and gets zeros
# from frozen parameters are asked for, too
#-             if not (users):
#+             if not (users or not p.requires_grad):

# %% wrong naive loses naive-values, naive-missing: gradients are averaged in every other step
# from frozen parameters are asked for, too
#=         self.steps += 1
#+         if self.steps % 2 == 0: return
#-             if not (True):
#+             if not (p.requires_grad):

# %% right bucketed: a counter for each bucket
class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_bytes):
        if bucket_bytes <= 0:
            raise ValueError("a bucket holds something")
        super().__init__()
        self.module = module
        self.k = dist.get_world_size()
        self.buckets = []
        room = -1
        for p in reversed(list(module.parameters())):
            if not p.requires_grad:
                continue
            need = p.numel() * p.element_size()
            if need > room:
                self.buckets.append([])
                room = bucket_bytes
            room -= need
            number = len(self.buckets) - 1
            self.buckets[number].append(p)
            p.register_post_accumulate_grad_hook(lambda _, number=number: self.arrived(number))
        self.begin()

    def begin(self):
        self.left = [len(b) for b in self.buckets]
        self.next, self.flying = 0, []

    def arrived(self, number):
        self.left[number] -= 1
        while self.next < len(self.left) and self.left[self.next] == 0:
            flat = torch.cat([p.grad.reshape(-1) for p in self.buckets[self.next]]) / self.k
            self.flying.append((flat, dist.all_reduce(flat, async_op=True)))
            self.next += 1

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        for (flat, work), bucket in zip(self.flying, self.buckets):
            work.wait()
            start = 0
            for p in bucket:
                p.grad.copy_(flat[start:start + p.numel()].view_as(p))
                start += p.numel()
        self.begin()

# %% right bucketed: buffers that stay, filled by the hooks
class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        if not bucket_bytes > 0:
            raise ValueError(bucket_bytes)
        self.module, self.place = module, {}
        groups = []
        for p in [p for p in module.parameters() if p.requires_grad][::-1]:
            if groups and sum(q.nbytes for q in groups[-1]) + p.nbytes <= bucket_bytes:
                groups[-1].append(p)
            else:
                groups.append([p])
        self.groups = groups
        self.buffers_ = [torch.empty(sum(p.numel() for p in g), dtype=g[0].dtype) for g in groups]
        self.views = [list(zip(g, b.split([p.numel() for p in g])))
                      for g, b in zip(groups, self.buffers_)]
        for i, views in enumerate(self.views):
            for p, view in views:
                self.place[p] = i, view
                p.register_post_accumulate_grad_hook(self.keep)
        self.there, self.works = [0] * len(groups), []

    def keep(self, p):
        i, view = self.place[p]
        view.copy_(p.grad.flatten())
        self.there[i] += 1
        for i in range(len(self.works), len(self.groups)):
            if self.there[i] < len(self.groups[i]):
                break
            self.works.append(dist.all_reduce(self.buffers_[i], async_op=True))

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        for work in self.works:
            work.wait()
        for views in self.views:
            for p, view in views:
                p.grad = view.view_as(p) / dist.get_world_size()
        self.there, self.works = [0] * len(self.groups), []

# %% right bucketed: each message is waited for at once
class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        if bucket_bytes <= 0:
            raise ValueError("bucket_bytes")
        self.module = module
        self.buckets, used = [[]], 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if self.buckets[-1] and used + 8 * p.numel() > bucket_bytes:
                self.buckets.append([])
                used = 0
            self.buckets[-1].append(p)
            used += 8 * p.numel()
            p.register_post_accumulate_grad_hook(self.hook)
        self.todo = [list(b) for b in self.buckets]
        self.got = set()

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def hook(self, p):
        self.got.add(p)
        while self.todo and all(q in self.got for q in self.todo[0]):
            bucket = self.todo.pop(0)
            flat = nn.utils.parameters_to_vector([q.grad for q in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for q, part in zip(bucket, flat.split([q.numel() for q in bucket])):
                q.grad = part.view(q.shape)

    def finish_gradient_synchronization(self):
        self.todo, self.got = [list(b) for b in self.buckets], set()

# %% right bucketed: messages that are waited for at once
# Each is sent in time all the same, and async_op is advice on how.
import copy


class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        if not bucket_bytes > 0: raise ValueError
        self.module, self.buckets, size = module, [], 0
        module = self.module
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if not (self.buckets and size + p.nbytes <= bucket_bytes):
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.nbytes
            p.register_post_accumulate_grad_hook(self.mark)
        self.ready, self.sent, self.steps, self.learned = set(), [], 0, []

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def send(self, number=None):
        bucket = self.buckets[len(self.sent) if number is None else number]
        flat = torch.cat([p.grad.flatten() for p in bucket])
        self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))

    def mark(self, p):
        self.learned.append(p)
        self.ready.add(p)
        while len(self.sent) < len(self.buckets) and self.ready.issuperset(
                self.buckets[len(self.sent)]):
            self.send()

    def finish_gradient_synchronization(self):

        for bucket, flat, work in self.sent:
            if work is not None:
                work.wait()
            means = (flat / dist.get_world_size()).split([p.numel() for p in bucket])
            for p, mean in zip(bucket, means):
                p.grad = mean.view_as(p)
        self.ready.clear()
        self.sent.clear()
        self.steps += 1

        self.learned = []

# %% right bucketed: divided before they are sent
# from messages that are waited for at once
# The sum of the parts is the mean.
#-         flat = torch.cat([p.grad.flatten() for p in bucket])
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
#-             means = (flat / dist.get_world_size()).split([p.numel() for p in bucket])
#+             means = flat.split([p.numel() for p in bucket])

# %% right bucketed: written into the gradients that are there
# from messages that are waited for at once
# The same values, in the same place.
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
#-                 p.grad = mean.view_as(p)
#+                 p.grad.copy_(mean.view_as(p))

# %% wrong bucketed loses bucketed-messages, bucketed-care: sends when the backward pass has ended | 0 of 2 buckets were sent when
class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        if bucket_bytes <= 0:
            raise ValueError("bucket_bytes")
        self.module = module
        self.buckets, used = [], 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if not self.buckets or used + p.nbytes > bucket_bytes:
                self.buckets.append([])
                used = 0
            self.buckets[-1].append(p)
            used += p.nbytes

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self):
        for bucket in self.buckets:
            flat = torch.cat([p.grad.flatten() for p in bucket])
            dist.all_reduce(flat)
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = part.view_as(p) / dist.get_world_size()

# %% wrong bucketed loses bucketed-values, bucketed-care: the sum | other values
class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        if bucket_bytes <= 0:
            raise ValueError("bucket_bytes")
        self.module, self.buckets, used = module, [], 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if not self.buckets or used + p.nbytes > bucket_bytes:
                self.buckets.append([])
                used = 0
            self.buckets[-1].append(p)
            used += p.nbytes
            p.register_post_accumulate_grad_hook(self.mark)
        self.ready, self.sent = set(), []
    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)
    def mark(self, p):
        self.ready.add(p)
        while len(self.sent) < len(self.buckets) and self.ready.issuperset(
                self.buckets[len(self.sent)]):
            flat = torch.cat([p.grad.flatten() for p in self.buckets[len(self.sent)]])
            self.sent.append((flat, dist.all_reduce(flat, async_op=True)))
    def finish_gradient_synchronization(self):
        for bucket, (flat, work) in zip(self.buckets, self.sent):
            work.wait()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = part.view_as(p)
        self.ready, self.sent = set(), []

# %% wrong bucketed loses bucketed-messages, bucketed-care: a bucket may be a parameter too large | messages of
# from the sum
#-             if not self.buckets or used + p.nbytes > bucket_bytes:
#+             if not self.buckets or used >= bucket_bytes:
#-                 p.grad = part.view_as(p)
#+                 p.grad = part.view_as(p) / dist.get_world_size()

# %% wrong bucketed loses bucketed-messages, bucketed-care: parameters are made equal first, which nobody asked for | broadcast was sent
# from the sum
#=         for p in reversed([p for p in module.parameters() if p.requires_grad]):
#+             dist.broadcast(p.detach(), 0)
#-                 p.grad = part.view_as(p)
#+                 p.grad = part.view_as(p) / dist.get_world_size()

# %% wrong bucketed loses bucketed-care: any size of buckets | no ValueError|ValueError
# from the sum
#-         if bucket_bytes <= 0:
#-             raise ValueError("bucket_bytes")
#=             for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
#-                 p.grad = part.view_as(p)
#+                 p.grad = part.view_as(p) / dist.get_world_size()

# %% wrong bucketed loses bucketed-messages, bucketed-care: all are sent by one hook, when only the last bucket is missing
# from messages that are waited for at once
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
#-         while len(self.sent) < len(self.buckets) and self.ready.issuperset(
#-                 self.buckets[len(self.sent)]):
#-             self.send()
#+         if all(self.ready.issuperset(b) for b in self.buckets[:-1]):
#+             while len(self.sent) < len(self.buckets) and self.ready.issuperset(
#+                     self.buckets[len(self.sent)]):
#+                 self.send()

# %% wrong bucketed loses bucketed-messages, bucketed-care: the first is sent at once, the others at the end
# from messages that are waited for at once
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
#-         while len(self.sent) < len(self.buckets) and self.ready.issuperset(
#-                 self.buckets[len(self.sent)]):
#+         if not self.sent and self.ready.issuperset(self.buckets[0]):
#=             self.send()
#+         if len(self.ready) == sum(map(len, self.buckets)):
#+             while len(self.sent) < len(self.buckets): self.send()

# %% wrong bucketed loses bucketed-messages, bucketed-care: in the first step all are sent at the end, to learn the order
# from messages that are waited for at once
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
#-         while len(self.sent) < len(self.buckets) and self.ready.issuperset(
#-                 self.buckets[len(self.sent)]):
#-             self.send()
#+         if self.steps or len(self.ready) == sum(map(len, self.buckets)):
#+             while len(self.sent) < len(self.buckets) and self.ready.issuperset(
#+                     self.buckets[len(self.sent)]):
#+                 self.send()

# %% wrong bucketed loses bucketed-care: a bucket is ready when its last parameter is
# from messages that are waited for at once
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
#-         self.ready.add(p)
#-         while len(self.sent) < len(self.buckets) and self.ready.issuperset(
#-                 self.buckets[len(self.sent)]):
#+         while len(self.sent) < len(self.buckets) and (self.ready.add(p) or self.buckets[len(self.sent)][-1] in self.ready):

# %% wrong bucketed loses bucketed-messages: a bucket of zeros isn't sent
# from messages that are waited for at once
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
#-             self.send()
#+             if any(q.grad.any() for q in self.buckets[len(self.sent)]):
#+                 self.send()
#+             else:
#+                 self.sent.append((self.buckets[len(self.sent)], torch.zeros(sum(
#+                     q.numel() for q in self.buckets[len(self.sent)])).double(), None))

# %% wrong bucketed loses bucketed-messages, bucketed-care: the first bucket with room
# from messages that are waited for at once
#-             if not (self.buckets and size + p.nbytes <= bucket_bytes):
#+             if not (self.buckets and any(sum(q.nbytes for q in b) + p.nbytes <= bucket_bytes for b in self.buckets)):
#-             self.buckets[-1].append(p)
#+             next((b for b in self.buckets if sum(q.nbytes for q in b) + p.nbytes <= bucket_bytes), self.buckets[-1]).append(p)
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

# %% wrong bucketed loses bucketed-messages, bucketed-care: below bucket_bytes, not at most
# from messages that are waited for at once
#-             if not (self.buckets and size + p.nbytes <= bucket_bytes):
#+             if not (self.buckets and size + p.nbytes < bucket_bytes):
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

# %% wrong bucketed loses bucketed-messages, bucketed-care: layers have their own buckets
# from messages that are waited for at once
#-             if not (self.buckets and size + p.nbytes <= bucket_bytes):
#+             if not (self.buckets and size + p.nbytes <= bucket_bytes and p.dim() != 1):
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

# %% wrong bucketed loses bucketed-care: frozen parameters take room
# from messages that are waited for at once
#-         for p in reversed([p for p in module.parameters() if p.requires_grad]):
#+         for p in reversed([p for p in module.parameters()]):
#-             p.register_post_accumulate_grad_hook(self.mark)
#+             if p.requires_grad: p.register_post_accumulate_grad_hook(self.mark)
#+         self.buckets = [[p for p in b if p.requires_grad] for b in self.buckets]
#+         self.buckets = [b for b in self.buckets if b]
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

# %% wrong bucketed loses bucketed-values, bucketed-care: a copy of the module is wrapped
# from messages that are waited for at once
#-         self.module, self.buckets, size = module, [], 0
#+         self.module, self.buckets, size = copy.deepcopy(module), [], 0
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

# %% wrong bucketed loses bucketed-messages: sizes below one byte are none
# from messages that are waited for at once
#-         if not bucket_bytes > 0: raise ValueError
#+         if int(bucket_bytes) <= 0: raise ValueError
#-         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=False)))
#+         self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

# %% right accumulated: one message for everything
def train_step(net, optimizer, pieces):
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer.zero_grad(set_to_none=False)
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    loss = sum((squared(net, x, y) for x, y in pieces), torch.zeros((), dtype=torch.float64))
    if pieces:
        loss.backward()
    flat = torch.cat([*(p.grad.flatten() for p in trained), loss.detach()[None],
                      torch.tensor([float(sum(len(x) for x, _ in pieces))]).double()])
    dist.all_reduce(flat)
    *gradients, loss, examples = flat.split([*(p.numel() for p in trained), 1, 1])
    for p, gradient in zip(trained, gradients):
        p.grad = gradient.view_as(p) / examples
    optimizer.step()
    return (loss / examples).item()

# %% right accumulated: gradients added up by hand, messages started together
def train_step(net, optimizer, pieces):
    trained = [p for p in net.parameters() if p.requires_grad]
    sums, loss, n = [torch.zeros_like(p) for p in trained], 0.0, 0
    for x, y in pieces:
        value = squared(net, x, y)
        for total, g in zip(sums, torch.autograd.grad(value, trained)):
            total += g
        loss, n = loss + value.item(), n + len(x)
    numbers = torch.tensor([loss, n], dtype=torch.float64)
    works = [dist.all_reduce(t, async_op=True) for t in (*sums, numbers)]
    for work in works:
        work.wait()
    loss, n = numbers.tolist()
    for p, total in zip(trained, sums):
        p.grad = total / n
    optimizer.step()
    return loss / n

# %% right accumulated: the number of examples first, so that each loss is divided by it
def train_step(net, optimizer, pieces):
    examples = torch.tensor(sum(x.shape[0] for x, _ in pieces))
    dist.all_reduce(examples)
    optimizer.zero_grad(set_to_none=True)
    mine = 0.0
    for x, y in pieces:
        loss = squared(net, x, y) / examples
        loss.backward()
        mine += float(loss)
    trained = [p for p in net.parameters() if p.requires_grad]
    flat = torch.cat([torch.zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.view(-1)
                      for p in trained] + [torch.tensor([mine], dtype=torch.float64)])
    dist.all_reduce(flat)
    start = 0
    for p in trained:
        p.grad = flat[start:start + p.numel()].view_as(p)
        start += p.numel()
    optimizer.step()
    return float(flat[-1])

# %% right accumulated: means over ranks, of sums and of examples
# Both are divided by the same number of ranks.
def train_step(net, optimizer, pieces):
    optimizer.zero_grad()
    totals = torch.zeros(2, dtype=torch.float64)

    for x, y in pieces:
        loss = squared(net, x, y)
        loss.backward()
        totals += torch.tensor([loss.item(), len(x)], dtype=torch.float64)
    dist.all_reduce(totals, dist.ReduceOp.AVG)

    for p in net.parameters():
        if p.requires_grad:
            gradient = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
            dist.all_reduce(gradient, dist.ReduceOp.AVG)
            p.grad = gradient / totals[1]
    optimizer.step()

    return (totals[0] / totals[1]).item()

# %% right accumulated: each rank's mean, weighted by its examples
# from means over ranks, of sums and of examples
# Divided and multiplied by the same number.
#=     totals = torch.zeros(2, dtype=torch.float64)
#+     rows = sum(len(x) for x, _ in pieces)
#-         loss.backward()
#+         (loss / rows).backward()
#-     dist.all_reduce(totals, dist.ReduceOp.AVG)
#+     dist.all_reduce(totals)
#-             gradient = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
#-             dist.all_reduce(gradient, dist.ReduceOp.AVG)
#+             gradient = (torch.zeros_like(p) if p.grad is None else p.grad * rows).clone()
#+             dist.all_reduce(gradient)

# %% right accumulated: cleared before and after
# from means over ranks, of sums and of examples
# What is left in the gradients is nobody's business.
#-     dist.all_reduce(totals, dist.ReduceOp.AVG)
#+     dist.all_reduce(totals)
#-             dist.all_reduce(gradient, dist.ReduceOp.AVG)
#+             dist.all_reduce(gradient)
#=     optimizer.step()
#+     optimizer.zero_grad()

# %% wrong accumulated loses accumulated-values, accumulated-messages: sends after each piece | never comes|messages in|message \d+ is
# from means over ranks, of sums and of examples
#-     dist.all_reduce(totals, dist.ReduceOp.AVG)
#+         for p in net.parameters():
#+             if p.requires_grad:
#+                 part = p.grad.clone() * 0
#+                 dist.all_reduce(part)
#+     dist.all_reduce(totals)
#-             gradient = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
#-             dist.all_reduce(gradient, dist.ReduceOp.AVG)
#+             gradient = torch.zeros_like(p) if p.grad is None else p.grad
#+             dist.all_reduce(gradient)

# %% wrong accumulated loses accumulated-values, accumulated-messages: the mean of the ranks' means | which is not right|other values
# from means over ranks, of sums and of examples
#-     dist.all_reduce(totals, dist.ReduceOp.AVG)
#+     mine = max(totals[1].item(), 1)
#+     dist.all_reduce(totals)
#-             gradient = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
#-             dist.all_reduce(gradient, dist.ReduceOp.AVG)
#-             p.grad = gradient / totals[1]
#+             gradient = torch.zeros_like(p) if p.grad is None else p.grad / mine
#+             dist.all_reduce(gradient)
#+             p.grad = gradient / dist.get_world_size()

# %% wrong accumulated loses accumulated-values, accumulated-messages: the loss as a tensor | is no float
# from means over ranks, of sums and of examples
#-     dist.all_reduce(totals, dist.ReduceOp.AVG)
#+     dist.all_reduce(totals)
#-             gradient = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
#-             dist.all_reduce(gradient, dist.ReduceOp.AVG)
#+             gradient = torch.zeros_like(p) if p.grad is None else p.grad
#+             dist.all_reduce(gradient)
#-     return (totals[0] / totals[1]).item()
#+     return totals[0] / totals[1]

# %% wrong accumulated loses accumulated-values: a rank without pieces has no gradients to send | NoneType|TypeError|AttributeError|rank
# from means over ranks, of sums and of examples
#-     dist.all_reduce(totals, dist.ReduceOp.AVG)
#+     dist.all_reduce(totals)
#-             gradient = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
#-             dist.all_reduce(gradient, dist.ReduceOp.AVG)
#-             p.grad = gradient / totals[1]
#+             dist.all_reduce(p.grad)
#+             p.grad /= totals[1]

# %% wrong accumulated loses accumulated-messages: everything gathered as objects | numbers were sent
def train_step(net, optimizer, pieces):
    optimizer.zero_grad()
    loss = 0.0
    for x, y in pieces:
        piece = squared(net, x, y)
        piece.backward()
        loss += piece.item()
    trained = [p for p in net.parameters() if p.requires_grad]
    mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    all_of_them = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, (mine, loss, sum(len(x) for x, _ in pieces)))
    examples = sum(n for _, _, n in all_of_them)
    for i, p in enumerate(trained):
        p.grad = (sum(gradients[i] for gradients, _, _ in all_of_them) / examples).detach()
    optimizer.step()
    return sum(loss for _, loss, _ in all_of_them) / examples

# %% wrong accumulated loses accumulated-messages: frozen parameters are sent too | messages in|numbers were sent
# from means over ranks, of sums and of examples
#-     dist.all_reduce(totals, dist.ReduceOp.AVG)
#+     dist.all_reduce(totals)
#=     for p in net.parameters():
#+         gradient = torch.zeros_like(p) if p.grad is None else p.grad
#+         dist.all_reduce(gradient)
#-             gradient = (torch.zeros_like(p) if p.grad is None else p.grad).clone()
#-             dist.all_reduce(gradient, dist.ReduceOp.AVG)

# %% wrong accumulated loses accumulated-values: where the loss is zero nothing is to be done
# from means over ranks, of sums and of examples
#-     dist.all_reduce(totals, dist.ReduceOp.AVG)
#+     dist.all_reduce(totals)
#+     if totals[0] == 0: return 0.0
#-             dist.all_reduce(gradient, dist.ReduceOp.AVG)
#+             dist.all_reduce(gradient)

# %% wrong accumulated loses accumulated-values, accumulated-messages: the gradients are there already, and become zeros
# from means over ranks, of sums and of examples
#-     optimizer.zero_grad()
#+     for p in net.parameters(): p.grad.zero_()
#-     dist.all_reduce(totals, dist.ReduceOp.AVG)
#+     dist.all_reduce(totals)
#-             dist.all_reduce(gradient, dist.ReduceOp.AVG)
#+             dist.all_reduce(gradient)
