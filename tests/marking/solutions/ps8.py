# %% right sharded: slices of a flat tensor of zeros, and new data in the parameters
class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **options):
        self.params = list(params)
        if not self.params:
            raise ValueError("no parameters")
        self.k, self.rank = dist.get_world_size(), dist.get_rank()
        self.n = sum(p.numel() for p in self.params)
        self.size = -(-self.n // self.k)
        self.shard = self.flat(self.params)[self.rank * self.size:][:self.size].clone()
        self.inner = optimizer_class([self.shard], **options)

    def flat(self, tensors):
        whole = torch.zeros(self.k * self.size, dtype=torch.float64)
        whole[:self.n] = torch.cat([t.detach().reshape(-1) for t in tensors])
        return whole

    def step(self):
        whole = self.flat([torch.zeros_like(p) if p.grad is None else p.grad
                           for p in self.params])
        mean = torch.zeros_like(self.shard)
        dist.reduce_scatter_single(mean, whole)
        mean /= self.k
        self.shard.grad = mean
        self.inner.step()
        dist.all_gather_single(whole, self.shard)
        sizes = [p.numel() for p in self.params]
        for p, new in zip(self.params, whole[:self.n].split(sizes)):
            p.data = new.view(p.shape).clone()

    def zero_grad(self):
        for p in self.params:
            p.grad = None

# %% right sharded: lists of tensors, started together with an answer later
class ShardedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, optimizer_class, **options):
        super().__init__(params, {})
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.world = dist.get_world_size()
        mine = nn.Parameter(self.split(self.all)[dist.get_rank()])
        self.inner = optimizer_class([mine], **options)

    def split(self, tensors):
        numbers = torch.cat([t.detach().reshape(-1) for t in tensors]).tolist()
        while len(numbers) % self.world:
            numbers.append(0.0)
        return list(torch.tensor(numbers, dtype=torch.float64).view(self.world, -1))

    @torch.no_grad()
    def step(self):
        (mine,) = self.inner.param_groups[0]["params"]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.all]
        mine.grad = torch.empty_like(mine)
        dist.reduce_scatter(mine.grad, self.split(gradients), async_op=True).wait()
        mine.grad.div_(self.world)
        self.inner.step()
        shards = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(shards, mine.detach(), async_op=True).wait()
        numbers = iter(torch.cat(shards))
        for p in self.all:
            for place in range(p.numel()):
                p.view(-1)[place] = next(numbers)

    def zero_grad(self):
        for p in self.all:
            if p.grad is not None:
                p.grad.zero_()

# %% right sharded: parameters are views of the flat tensor, the shard too
class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **options):
        params = [*params]
        if len(params) == 0:
            raise ValueError("params is empty")
        k = dist.get_world_size()
        total = sum(p.numel() for p in params)
        padded = (total + k - 1) // k * k
        self.data = params[0].new_zeros(padded).detach()
        self.grads = torch.zeros_like(self.data)
        self.places, begin = [], 0
        for p in params:
            end = begin + p.numel()
            self.data[begin:end] = p.data.flatten()
            p.data = self.data[begin:end].view(p.shape)
            self.places.append((p, slice(begin, end)))
            begin = end
        own = self.data.view(k, -1)[dist.get_rank()]
        self.inner = optimizer_class([own], **options)
        self.own = own

    def step(self):
        self.grads.zero_()
        for p, place in self.places:
            if p.grad is not None:
                self.grads[place] = p.grad.flatten()
        self.own.grad = torch.empty_like(self.own)
        dist.reduce_scatter_single(self.own.grad, self.grads / dist.get_world_size())
        self.inner.step()
        dist.all_gather_single(self.data, self.own.clone())

    def zero_grad(self):
        for p, _ in self.places:
            p.grad = None

# %% right sharded: PyTorch's vectors of parameters
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **options):
        self.params = tuple(params)
        self.world, rank = dist.get_world_size(), dist.get_rank()
        if len(self.params) == 0:
            raise ValueError
        whole = parameters_to_vector(self.params).detach()
        self.extra = whole.new_zeros((self.world - len(whole) % self.world) % self.world)
        self.own = torch.cat([whole, self.extra]).reshape(self.world, -1)[rank].clone()
        self.inner = optimizer_class([{"params": self.own}], **options)

    def step(self):
        pieces = [torch.zeros(p.shape) if p.grad is None else p.grad for p in self.params]
        whole = torch.cat([piece.double().ravel() for piece in pieces] + [self.extra])
        self.own.grad = self.own.clone()
        dist.reduce_scatter_single(input=whole, output=self.own.grad)
        self.own.grad *= 1 / self.world
        self.inner.step()
        dist.all_gather_single(input_tensor=self.own, output_tensor=whole)
        vector_to_parameters(whole[:len(whole) - len(self.extra)], self.params)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

# %% right sharded: the message takes the mean
# AVG is the sum divided by the number of ranks.
class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **options):
        self.params = list(params)
        if not self.params:
            raise ValueError("no parameters")
        k, self.steps, self.memory = dist.get_world_size(), 0, {}
        flat = self.flatten([p for p in self.params])
        self.shard = flat.chunk(k)[dist.get_rank()].clone()
        self.inner = optimizer_class([self.shard], **options)


    def flatten(self, tensors, pad=0):
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % dist.get_world_size()), value=pad)

    @torch.no_grad()
    def step(self):
        self.steps += 1

        flat = self.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params], 0)
        total = torch.empty_like(self.shard)
        dist.reduce_scatter_single(total, flat, op=dist.ReduceOp.AVG)
        self.shard.grad = total
        self.inner.step()
        dist.all_gather_single(flat, self.shard)
        begin = 0
        for p in self.params:
            p.copy_(flat[begin:begin + p.numel()].view_as(p))
            begin += p.numel()


    def zero_grad(self):
        for p in self.params:
            p.grad = None

# %% right sharded: gradients are divided before they are sent
# from the message takes the mean
# The sum of the parts is the mean.
#-         dist.reduce_scatter_single(total, flat, op=dist.ReduceOp.AVG)
#+         dist.reduce_scatter_single(total, flat / dist.get_world_size())

# %% right sharded: nobody looks whether there is a parameter
# from the message takes the mean
# torch.cat of no tensors raises ValueError by itself.
#-         if not self.params:
#+         if False:
#-         dist.reduce_scatter_single(total, flat, op=dist.ReduceOp.AVG)
#-         self.shard.grad = total
#+         dist.reduce_scatter_single(total, flat)
#+         self.shard.grad = total / dist.get_world_size()

# %% right sharded: cleared to zeros, None too
# from the message takes the mean
# To zeros or to None, as you like.
#-         dist.reduce_scatter_single(total, flat, op=dist.ReduceOp.AVG)
#-         self.shard.grad = total
#+         dist.reduce_scatter_single(total, flat)
#+         self.shard.grad = total / dist.get_world_size()
#-             p.grad = None
#+             p.grad = torch.zeros_like(p)

# %% wrong sharded loses sharded-values, sharded-messages, sharded-care: no padding, shards rounded down | invalid|not match|size|shape|expanded|RuntimeError|ValueError
# from slices of a flat tensor of zeros, and new data in the parameters
#-         self.size = -(-self.n // self.k)
#+         self.size = self.n // self.k

# %% wrong sharded loses sharded-messages, sharded-care: a whole shard of padding where there need be none | message 1 is an? reduce_scatter of
# from slices of a flat tensor of zeros, and new data in the parameters
#-         self.size = -(-self.n // self.k)
#+         self.size = self.n // self.k + 1

# %% wrong sharded loses sharded-values, sharded-messages: the mean of the ranks that have a gradient, by a message more | other values
# from slices of a flat tensor of zeros, and new data in the parameters
#=                            for p in self.params])
#+         users = [torch.full_like(p, p.grad is not None) for p in self.params]
#+         users = self.flat(users)
#+         dist.all_reduce(users)
#-         mean /= self.k
#+         mean /= users[self.rank * self.size:][:self.size].clamp(min=1)

# %% wrong sharded loses sharded-care: no parameters are not an error | no parameters: .*no ValueError
# from slices of a flat tensor of zeros, and new data in the parameters
#-             raise ValueError("no parameters")
#+             return

# %% wrong sharded loses sharded-values, sharded-care: options are left out | other values|lr
# from slices of a flat tensor of zeros, and new data in the parameters
#-         self.inner = optimizer_class([self.shard], **options)
#+         self.inner = optimizer_class([self.shard], lr=options["lr"])

# %% wrong sharded loses sharded-values, sharded-messages, sharded-care: each parameter by itself, as in chapter 16 | None on all ranks.*other values
class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **options):
        self.params = list(params)
        self.k, self.rank = dist.get_world_size(), dist.get_rank()
        self.shards = [self.cut(p.detach())[self.rank].clone() for p in self.params]
        self.inner = optimizer_class(self.shards, **options)

    def cut(self, whole):
        flat = whole.reshape(-1)
        return F.pad(flat, (0, -len(flat) % self.k)).view(self.k, -1)

    def step(self):
        for p, shard in zip(self.params, self.shards):
            count = torch.tensor(int(p.grad is not None))
            dist.all_reduce(count)
            shard.grad = None
            if count > 0:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                shard.grad = torch.empty_like(shard)
                dist.reduce_scatter_single(shard.grad, self.cut(gradient).flatten())
                shard.grad /= self.k
        self.inner.step()
        for p, shard in zip(self.params, self.shards):
            whole = shard.new_empty(self.k * len(shard))
            dist.all_gather_single(whole, shard)
            p.data = whole[:p.numel()].view(p.shape)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

# %% wrong sharded loses sharded-values, sharded-messages, sharded-care: whole parameters, dealt out to the ranks | the example above|empty parameter list
class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **options):
        self.params = list(params)
        mine = self.params[dist.get_rank()::dist.get_world_size()]
        self.inner = optimizer_class(mine, **options)

    def step(self):
        k = dist.get_world_size()
        for p in self.params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= k
        self.inner.step()
        for i, p in enumerate(self.params):
            dist.broadcast(p.data, i % k)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

# %% wrong sharded loses sharded-values: without any gradient since the start there is no step
# from the message takes the mean
#=         self.steps += 1
#+         if all(p.grad is None for p in self.params) and not self.memory: return
#+         self.memory[0] = True
#-         dist.reduce_scatter_single(total, flat, op=dist.ReduceOp.AVG)
#-         self.shard.grad = total
#+         dist.reduce_scatter_single(total, flat)
#+         self.shard.grad = total / dist.get_world_size()

# %% wrong sharded loses sharded-values, sharded-care: a shard without a gradient isn't updated
# from the message takes the mean
#-         dist.reduce_scatter_single(total, flat, op=dist.ReduceOp.AVG)
#-         self.shard.grad = total
#-         self.inner.step()
#+         dist.reduce_scatter_single(total, flat)
#+         self.shard.grad = total / dist.get_world_size()
#+         if total.any(): self.inner.step()

# %% wrong sharded loses sharded-care: None becomes zeros, in the parameter
# from the message takes the mean
#=         self.steps += 1
#+         for p in self.params:
#+             p.grad = torch.zeros_like(p) if p.grad is None else p.grad
#-         dist.reduce_scatter_single(total, flat, op=dist.ReduceOp.AVG)
#-         self.shard.grad = total
#+         dist.reduce_scatter_single(total, flat)
#+         self.shard.grad = total / dist.get_world_size()

# %% wrong sharded loses sharded-care: the caller's list is used up
# from the message takes the mean
#-         self.params = list(params)
#+         self.params = [params.pop(0) for _ in list(params)] if type(params) is list else list(params)
#-         dist.reduce_scatter_single(total, flat, op=dist.ReduceOp.AVG)
#-         self.shard.grad = total
#+         dist.reduce_scatter_single(total, flat)
#+         self.shard.grad = total / dist.get_world_size()

# %% wrong sharded loses sharded-messages: one rank has nothing to send
# from the message takes the mean
#=         self.steps += 1
#+         if dist.get_world_size() == 1:
#+             self.shard.grad = self.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])
#+             self.inner.step()
#+             begin = 0
#+             for p in self.params:
#+                 p.copy_(self.shard[begin:begin + p.numel()].view_as(p))
#+                 begin += p.numel()
#+             return
#-         dist.reduce_scatter_single(total, flat, op=dist.ReduceOp.AVG)
#-         self.shard.grad = total
#+         dist.reduce_scatter_single(total, flat)
#+         self.shard.grad = total / dist.get_world_size()

# %% right linear: a function whose formulas are written out
class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape
        self.has_bias = linear.bias is not None
        self.k = dist.get_world_size()
        flat = self.flatten(linear.weight, linear.bias)
        self.shard = nn.Parameter(flat.view(self.k, -1)[dist.get_rank()].clone())

    def flatten(self, weight, bias):
        flat = weight.detach().flatten()
        if self.has_bias:
            flat = torch.cat([flat, bias.detach()])
        return F.pad(flat, (0, -len(flat) % self.k))

    def unshard(self):
        whole = torch.empty(self.k * len(self.shard), dtype=self.shard.dtype)
        dist.all_gather_single(whole, self.shard.detach())
        n = self.outputs * self.inputs
        weight = whole[:n].view(self.outputs, self.inputs)
        return weight, whole[n:n + self.outputs] if self.has_bias else None

    def forward(self, x):
        return Apply.apply(x, self.shard, self)


class Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, layer):
        weight, bias = layer.unshard()
        ctx.x, ctx.layer = x, layer
        y = x @ weight.T
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, g):
        x, layer, gx, gs = ctx.x, ctx.layer, None, None
        if ctx.needs_input_grad[0]:
            weight, _ = layer.unshard()
            gx = g @ weight
        if ctx.needs_input_grad[1]:
            rows, xs = g.reshape(-1, layer.outputs), x.reshape(-1, layer.inputs)
            flat = layer.flatten(rows.T @ xs, rows.sum(0))
            gs = torch.empty_like(layer.shard)
            dist.reduce_scatter_single(gs, flat)
            gs /= layer.k
        return gx, gs, None

# %% right linear: a gathered weight for F.linear, of which a note is saved
class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        ctx.world = dist.get_world_size()
        pieces = [torch.empty_like(shard) for _ in range(ctx.world)]
        dist.all_gather(pieces, shard.detach())
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, gradient):
        mine = gradient.new_empty(len(gradient) // ctx.world)
        dist.reduce_scatter(mine, list((gradient / ctx.world).chunk(ctx.world)))
        return mine


class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.shape, self.bias = linear.weight.shape, linear.bias is not None
        whole = nn.utils.parameters_to_vector(linear.parameters()).detach()
        world = dist.get_world_size()
        size = (len(whole) + world - 1) // world
        mine = torch.zeros(size, dtype=whole.dtype)
        part = whole[dist.get_rank() * size:(dist.get_rank() + 1) * size]
        mine[:len(part)] = part
        self.shard = nn.Parameter(mine)

    def whole(self):
        flat = Whole.apply(self.shard)
        rows, columns = self.shape
        weight = flat[:rows * columns].view(rows, columns)
        return weight, flat[rows * columns:rows * columns + rows] if self.bias else None

    def unshard(self):
        with torch.no_grad():
            return self.whole()

    def forward(self, x):
        weight, bias = self.whole()
        kept = weight.untyped_storage().data_ptr()

        def pack(tensor):
            if tensor.untyped_storage().data_ptr() != kept:
                return tensor
            return tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(saved):
            if torch.is_tensor(saved):
                return saved
            return self.unshard()[0].as_strided(*saved)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return F.linear(x, weight, bias)

# %% right linear: the backward pass computes the layer again, and lets autograd differentiate
def gather(shard):
    whole = torch.cat([shard.detach()] * dist.get_world_size())
    dist.all_gather_single(whole, shard.detach().clone())
    return whole


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, x, compute):
        ctx.save_for_backward(shard, x)
        ctx.compute = compute
        return compute(gather(shard), x)

    @staticmethod
    def backward(ctx, gradient):
        shard, x = ctx.saved_tensors
        of_shard, of_x, _ = ctx.needs_input_grad
        k = dist.get_world_size()
        x = x.detach().requires_grad_(of_x)
        whole = gather(shard) if of_x else torch.zeros(k * len(shard), dtype=x.dtype)
        whole.requires_grad_(of_shard)
        with torch.enable_grad():
            wanted = [t for t in (whole, x) if t.requires_grad]
            found = list(torch.autograd.grad(ctx.compute(whole, x), wanted, gradient))
        part = None
        if of_shard:
            part = torch.zeros_like(shard)
            dist.reduce_scatter_single(part, found.pop(0))
            part = part / k
        return part, found.pop() if of_x else None, None


class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.sizes = [p.shape for p in linear.parameters()]
        pieces = torch.cat([p.data.flatten() for p in linear.parameters()]).tolist()
        pieces += [0.0] * (-len(pieces) % dist.get_world_size())
        size = len(pieces) // dist.get_world_size()
        self.shard = nn.Parameter(torch.tensor(
            pieces[dist.get_rank() * size:][:size], dtype=torch.float64))

    def view(self, whole):
        begin = 0
        for shape in self.sizes:
            yield whole[begin:begin + shape.numel()].view(shape)
            begin += shape.numel()

    def forward(self, x):
        return Again.apply(self.shard, x, lambda whole, x: F.linear(x, *self.view(whole)))

    def unshard(self):
        weight, *bias = self.view(gather(self.shard))
        return weight, bias[0] if bias else None

# %% right linear: hooks: the gradient of the output tells what to send
class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.k, self.linear_shape = dist.get_world_size(), tuple(linear.weight.shape)
        self.biased = linear.bias is not None
        columns = [linear.weight.detach().reshape(-1)]
        if self.biased:
            columns.append(linear.bias.detach())
        flat = torch.cat(columns)
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % self.k)])
        self.shard = nn.Parameter(flat.tensor_split(self.k)[dist.get_rank()].clone())

    @torch.no_grad()
    def unshard(self):
        whole = self.shard.new_empty(self.k * self.shard.numel())
        dist.all_gather_single(whole, self.shard)
        outputs, inputs = self.linear_shape
        bias = whole[outputs * inputs:][:outputs] if self.biased else None
        return whole[:outputs * inputs].reshape(self.linear_shape), bias

    def forward(self, x):
        with torch.no_grad():
            y = F.linear(x, *self.unshard())
        if not torch.is_grad_enabled():
            return y
        wants_shard, wants_x = self.shard.requires_grad, x.requires_grad
        layer, kept = self, x.detach()

        class Backward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, shard):
                return y

            @staticmethod
            def backward(ctx, g):
                of_x = torch.matmul(g, layer.unshard()[0]) if wants_x else None
                if wants_shard:
                    layer.reduce(g, kept)
                return of_x, None

        return Backward.apply(x, self.shard)

    def reduce(self, g, x):
        outputs, inputs = self.linear_shape
        g, x = g.reshape(-1, outputs), x.reshape(-1, inputs)
        flat = torch.einsum("no,ni->oi", g, x).flatten()
        if self.biased:
            flat = torch.cat([flat, g.sum(0)])
        flat = F.pad(flat, (0, self.k * self.shard.numel() - flat.numel())) / self.k
        part = torch.empty_like(self.shard)
        dist.reduce_scatter_single(part, flat)
        self.shard.grad = part if self.shard.grad is None else self.shard.grad + part

# %% right linear: a copy of the shard for the backward pass
# Its shard it may keep.
def count(tensors):
    return sum(t.numel() for t in tensors)


class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.shapes = [p.shape for p in linear.parameters()]
        flat = self.flatten(linear.parameters())
        shard = flat.chunk(dist.get_world_size())[dist.get_rank()].clone()
        self.shard = nn.Parameter(shard)
        self.memory = {}


    def flatten(self, tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % dist.get_world_size()))

    def unshard(self):
        weight, bias = self.gather()

        return weight, bias

    def gather(self):

        flat = self.shard.new_empty(len(self.shard) * dist.get_world_size())
        dist.all_gather_single(flat, self.shard.detach())
        sizes = [shape.numel() for shape in self.shapes]
        weight, *bias = [piece.view(shape) for piece, shape in zip(
            flat[:sum(sizes)].split(sizes), self.shapes)]
        return weight, bias[0] if bias else None

    def forward(self, x):

        return Gathered.apply(x, self.shard, self)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, layer):
        weight, bias = layer.gather()
        ctx.layer = layer
        ctx.save_for_backward(x)
        ctx.mine = shard.detach().clone()
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        layer, of_x, of_shard = ctx.layer, None, None
        (x,) = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if needs[0]:
            weight, bias = layer.gather()

            of_x = gradient @ weight
        if needs[1]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            parts = [rows.T @ x.reshape(-1, x.shape[-1]), rows.sum(0)]
            flat = layer.flatten(parts[:len(layer.shapes)])
            mean, of_shard = flat / dist.get_world_size(), torch.empty_like(layer.shard)
            dist.reduce_scatter_single(of_shard, mean)
        return of_x, of_shard if needs[1] else None, None

# %% right linear: a copy of x for the backward pass
# from a copy of the shard for the backward pass
# x it may keep.
#-         ctx.save_for_backward(x)
#-         ctx.mine = shard.detach().clone()
#+         ctx.x = x.detach().numpy().copy()
#-         (x,) = ctx.saved_tensors
#+         x = torch.from_numpy(ctx.x)

# %% right linear: the memory of the whole is given back, the tensor kept
# from a copy of the shard for the backward pass
# A tensor whose memory was given back keeps nothing, as FSDP does it.
#=         return weight, bias
#+     def finish(self, y, weight):
#+         weight.untyped_storage().resize_(0)
#+         return y
#-         ctx.mine = shard.detach().clone()
#-         return F.linear(x, weight, bias)
#+         ctx.whole = weight
#+         return layer.finish(F.linear(x, weight, bias), weight)

# %% right linear: the sum is divided when it has come
# from a copy of the shard for the backward pass
# The mean of the parts is their sum's.
#-         ctx.mine = shard.detach().clone()
#=             flat = layer.flatten(parts[:len(layer.shapes)])
#-             mean, of_shard = flat / dist.get_world_size(), torch.empty_like(layer.shard)
#+             mean, of_shard = flat, torch.empty_like(layer.shard)
#-         return of_x, of_shard if needs[1] else None, None
#+         return of_x, of_shard / dist.get_world_size() if needs[1] else None, None

# %% wrong linear loses linear-forgets: the last whole weight stays on the layer | are kept before the backward pass
# from a function whose formulas are written out
#-         n = self.outputs * self.inputs
#+         n, self.last = self.outputs * self.inputs, whole

# %% wrong linear loses linear-forgets: the shard is a view of the flat tensor | keeps the whole alive
# from a function whose formulas are written out
#-         self.shard = nn.Parameter(flat.view(self.k, -1)[dist.get_rank()].clone())
#+         self.shard = nn.Parameter(flat.view(self.k, -1)[dist.get_rank()])

# %% wrong linear loses linear-forgets: the layer that was given stays in the module | not `shard` alone
# from a function whose formulas are written out
#-         self.k = dist.get_world_size()
#+         self.k, self.linear = dist.get_world_size(), linear

# %% wrong linear loses linear-messages: two reduce-scatters, of the weight's gradient and of the bias's | message \d+ is an? reduce_scatter|messages were sent
# from a function whose formulas are written out
#-             flat = layer.flatten(rows.T @ xs, rows.sum(0))
#-             gs = torch.empty_like(layer.shard)
#-             dist.reduce_scatter_single(gs, flat)
#+             gs = 0
#+             for part in (layer.flatten(rows.T @ xs, 0 * rows.sum(0)),
#+                          layer.flatten(0 * (rows.T @ xs), rows.sum(0))):
#+                 mine = torch.empty_like(layer.shard)
#+                 dist.reduce_scatter_single(mine, part)
#+                 gs = gs + mine

# %% wrong linear loses linear-values, linear-messages, linear-forgets: every layer has a bias | NoneType
# from a function whose formulas are written out
#-         self.has_bias = linear.bias is not None
#+         self.has_bias = True

# %% wrong linear loses linear-values: x has two axes, always | without other axes|RuntimeError|mat|dim|shape
# from a function whose formulas are written out
#-             rows, xs = g.reshape(-1, layer.outputs), x.reshape(-1, layer.inputs)
#+             rows, xs = g, x

# %% wrong linear loses linear-values, linear-messages, linear-forgets: no padding | size|shape|invalid
# from a function whose formulas are written out
#-         return F.pad(flat, (0, -len(flat) % self.k))
#+         return flat

# %% wrong linear loses linear-values: unshard() returns the bias as zeros where there is none | unshard.*not None
# from a function whose formulas are written out
#-         return weight, whole[n:n + self.outputs] if self.has_bias else None
#+         return weight, whole[n:n + self.outputs] if self.has_bias else (
#+             torch.zeros(self.outputs).double())

# %% wrong linear loses linear-values: x of the latest pass, in the layer
# from a copy of the shard for the backward pass
#-         ctx.save_for_backward(x)
#-         ctx.mine = shard.detach().clone()
#+         layer.x = x
#-         (x,) = ctx.saved_tensors
#+         x = layer.x

# %% wrong linear loses linear-messages: what needs a gradient is what needed one first
# from a copy of the shard for the backward pass
#-         ctx.mine = shard.detach().clone()
#=         (x,) = ctx.saved_tensors
#-         needs = ctx.needs_input_grad
#+         needs = layer.memory.setdefault('needs', ctx.needs_input_grad)

# %% wrong linear loses linear-messages: reduces what is zero without a message
# from a copy of the shard for the backward pass
#-         ctx.mine = shard.detach().clone()
#=             mean, of_shard = flat / dist.get_world_size(), torch.empty_like(layer.shard)
#-             dist.reduce_scatter_single(of_shard, mean)
#+             if mean.any(): dist.reduce_scatter_single(of_shard, mean)
#+             else: of_shard.zero_()

# %% wrong linear loses linear-messages: one rank has nothing to gather
# from a copy of the shard for the backward pass
#=     def gather(self):
#+         if dist.get_world_size() == 1:
#+             sizes = [s.numel() for s in self.shapes]
#+             parts = [t.view(s) for t, s in zip(self.shard.detach().clone().split(sizes), self.shapes)]
#+             return (*parts, None)[:2]
#-         ctx.mine = shard.detach().clone()

# %% wrong linear loses linear-messages: unshard() gathers weight and bias, a message each
# from a copy of the shard for the backward pass
#=         weight, bias = self.gather()
#+         self.gather()
#-         ctx.mine = shard.detach().clone()

# %% right memory: bisection, with the larger half first
def check(ranks, stage, size):
    if ranks < 1 or size < 0 or stage not in range(4):
        raise ValueError(f"{size=}, {ranks=}, {stage=}")


def memory(numbers, ranks, stage):
    check(ranks, stage, numbers)
    shard = (numbers + ranks - 1) // ranks
    weights = shard if stage == 3 else numbers
    gradients = shard if stage >= 2 else numbers
    state = shard if stage >= 1 else numbers
    return 2 * weights + 2 * gradients + 12 * state


def most(limit, ranks, stage):
    check(ranks, stage, limit)
    low, high = 0, ranks * (limit // 16 + 1) + limit
    while low < high:
        middle = (low + high + 1) // 2
        if memory(middle, ranks, stage) > limit:
            high = middle - 1
        else:
            low = middle
    return low

# %% right memory: a table of bytes, and a formula
TABLE = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}


def memory(numbers, ranks, stage):
    if stage not in TABLE or numbers < 0 or ranks <= 0:
        raise ValueError("no such model, ranks or stage")
    whole, sharded = TABLE[stage]
    full, rest = divmod(numbers, ranks)
    return whole * numbers + sharded * (full + (rest > 0))


def most(limit, ranks, stage):
    if stage not in TABLE or limit < 0 or ranks <= 0:
        raise ValueError("no such limit, ranks or stage")
    whole, sharded = TABLE[stage]
    if stage == 0:
        return limit // 16
    full = limit // (whole * ranks + sharded)
    left = limit - full * (whole * ranks + sharded) - sharded
    if stage == 3 or left < whole:
        return full * ranks
    return full * ranks + left // whole

# %% right memory: doubles a step until it is too much, then halves it
import math
from fractions import Fraction


def memory(numbers, ranks, stage):
    if numbers < 0:
        raise ValueError("numbers")
    if ranks < 1:
        raise ValueError("ranks")
    if stage not in (0, 1, 2, 3):
        raise ValueError("stage")
    shard = math.ceil(Fraction(numbers, ranks))
    return 2 * [numbers, numbers, numbers, shard][stage] + 2 * [
        numbers, numbers, shard, shard][stage] + 12 * [numbers, shard, shard, shard][stage]


def most(limit, ranks, stage):
    if limit < 0:
        raise ValueError("limit")
    memory(1, ranks, stage)
    count, step = 0, 1
    while memory(count + step, ranks, stage) <= limit:
        count += step
        step *= 2
    while step:
        if memory(count + step, ranks, stage) <= limit:
            count += step
        step //= 2
    return count

# %% right memory: stage 2 shards weights, stage 3 gradients, too
# A gradient has as many bytes as a weight.
def memory(numbers, ranks, stage):

    if numbers < 0 or ranks < 1 or stage not in (0, 1, 2, 3): raise ValueError
    shard = -(-numbers // ranks)
    return (12 * (shard if stage >= 1 else numbers)
            + 2 * (shard if stage >= 2 else numbers)
            + 2 * (shard if stage >= 3 else numbers))


def most(limit, ranks, stage):

    if limit < 0 or ranks < 1 or stage not in (0, 1, 2, 3): raise ValueError
    low, high = 0, limit * ranks + 1
    while high - low > 1:
        middle = (low + high) // 2
        if memory(middle, ranks, stage) <= limit:
            low = middle
        else:
            high = middle
    return low

# %% right memory: a limit of two hundred digits would do
# Limits of fifty digits are asked for.
def memory(numbers, ranks, stage):

    if numbers < 0 or ranks < 1 or stage not in (0, 1, 2, 3): raise ValueError
    shard = -(-numbers // ranks)
    return (12 * (shard if stage >= 1 else numbers)
            + 2 * (shard if stage >= 3 else numbers)
            + 2 * (shard if stage >= 2 else numbers))


def most(limit, ranks, stage):

    if limit < 0 or ranks < 1 or stage not in (0, 1, 2, 3): raise ValueError
    low, high = 0, 10**200 * ranks
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if memory(middle, ranks, stage) <= limit else (low, middle)
    return low

# %% right memory: the last round by a division
# What is left after the next number's shards is divided by what a number takes whole.
def memory(numbers, ranks, stage):

    if numbers < 0 or ranks < 1 or stage not in (0, 1, 2, 3): raise ValueError
    shard = -(-numbers // ranks)
    return (12 * (shard if stage >= 1 else numbers)
            + 2 * (shard if stage >= 3 else numbers)
            + 2 * (shard if stage >= 2 else numbers))


def most(limit, ranks, stage):

    if limit < 0 or ranks < 1 or stage not in (0, 1, 2, 3): raise ValueError
    whole, shared = [(16, 0), (4, 12), (2, 14), (0, 16)][stage]
    count = limit // (whole * ranks + shared) * ranks
    left = limit - memory(count, ranks, stage) - shared
    if left >= 0: count += min(ranks - 1, left // whole if whole else ranks)
    return count

# %% right memory: the errors of the other function
# from stage 2 shards weights, stage 3 gradients, too
# Both refuse the same.
#-             + 2 * (shard if stage >= 2 else numbers)
#-             + 2 * (shard if stage >= 3 else numbers))
#+             + 2 * (shard if stage >= 3 else numbers)
#+             + 2 * (shard if stage >= 2 else numbers))
#-     if limit < 0 or ranks < 1 or stage not in (0, 1, 2, 3): raise ValueError
#+     memory(limit, ranks, stage)

# %% wrong memory loses memory-bytes, memory-most: bytes as floats | not an int
# from bisection, with the larger half first
#-     return 2 * weights + 2 * gradients + 12 * state
#+     return 2.0 * weights + 2.0 * gradients + 12.0 * state

# %% wrong memory loses memory-bytes, memory-most: float32: 16 bytes, in other parts | which is not right
# from bisection, with the larger half first
#-     return 2 * weights + 2 * gradients + 12 * state
#+     return 4 * weights + 4 * gradients + 8 * state

# %% wrong memory loses memory-bytes, memory-most: gradients are sharded in stage 1 | which is not right
# from bisection, with the larger half first
#-     gradients = shard if stage >= 2 else numbers
#+     gradients = shard if stage >= 1 else numbers

# %% wrong memory loses memory-bytes, memory-most: gradients are not sharded in stage 3 | which is not right
# from bisection, with the larger half first
#-     gradients = shard if stage >= 2 else numbers
#+     gradients = shard if stage == 2 else numbers

# %% wrong memory loses memory-bytes: a stage 4 that is taken for 3 | no ValueError
# from bisection, with the larger half first
#-     if ranks < 1 or size < 0 or stage not in range(4):
#+     if ranks < 1 or size < 0 or stage < 0:
#-     weights = shard if stage == 3 else numbers
#+     weights = shard if stage >= 3 else numbers
#=     check(ranks, stage, limit)
#+     if stage > 3:
#+         raise ValueError(stage)

# %% wrong memory loses memory-most: a limit below zero | no ValueError
# from bisection, with the larger half first
#-     check(ranks, stage, limit)
#+     check(ranks, stage, 0)

# %% wrong memory loses memory-most: the limit itself doesn't fit | which is not right
# from bisection, with the larger half first
#-         if memory(middle, ranks, stage) > limit:
#+         if memory(middle, ranks, stage) >= limit:

# %% wrong memory loses memory-most: the formula without rounding | which is not right|not an int
# from bisection, with the larger half first
#=     check(ranks, stage, limit)
#+     whole = {0: 16, 1: 4, 2: 2, 3: 0}[stage]
#+     return limit * ranks // (whole * ranks + 16 - whole)

# %% wrong memory loses memory-bytes: no numbers take nothing, whatever else is said
# from stage 2 shards weights, stage 3 gradients, too
#= def memory(numbers, ranks, stage):
#+     if numbers == 0: return 0
#-             + 2 * (shard if stage >= 2 else numbers)
#-             + 2 * (shard if stage >= 3 else numbers))
#+             + 2 * (shard if stage >= 3 else numbers)
#+             + 2 * (shard if stage >= 2 else numbers))

# %% wrong memory loses memory-bytes: one rank holds all, whatever the stage
# from stage 2 shards weights, stage 3 gradients, too
#= def memory(numbers, ranks, stage):
#+     if ranks == 1 and numbers >= 0: return 16 * numbers
#-             + 2 * (shard if stage >= 2 else numbers)
#-             + 2 * (shard if stage >= 3 else numbers))
#+             + 2 * (shard if stage >= 3 else numbers)
#+             + 2 * (shard if stage >= 2 else numbers))

# %% wrong memory loses memory-bytes: in stage 0 nobody asks for the ranks
# from stage 2 shards weights, stage 3 gradients, too
#= def memory(numbers, ranks, stage):
#+     if stage == 0 and numbers >= 0: return 16 * numbers
#-             + 2 * (shard if stage >= 2 else numbers)
#-             + 2 * (shard if stage >= 3 else numbers))
#+             + 2 * (shard if stage >= 3 else numbers)
#+             + 2 * (shard if stage >= 2 else numbers))

# %% wrong memory loses memory-bytes: below 0 is looked at where something is whole
# from stage 2 shards weights, stage 3 gradients, too
#-     if numbers < 0 or ranks < 1 or stage not in (0, 1, 2, 3): raise ValueError
#+     if ranks < 1 or stage not in (0, 1, 2, 3) or stage < 3 and numbers < 0: raise ValueError
#-             + 2 * (shard if stage >= 2 else numbers)
#-             + 2 * (shard if stage >= 3 else numbers))
#+             + 2 * (shard if stage >= 3 else numbers)
#+             + 2 * (shard if stage >= 2 else numbers))

# %% wrong memory loses memory-bytes: stages count from the end, too
# from stage 2 shards weights, stage 3 gradients, too
#= def memory(numbers, ranks, stage):
#+     stage = [0, 1, 2, 3][stage] if -5 < stage < 4 else 9
#-             + 2 * (shard if stage >= 2 else numbers)
#-             + 2 * (shard if stage >= 3 else numbers))
#+             + 2 * (shard if stage >= 3 else numbers)
#+             + 2 * (shard if stage >= 2 else numbers))

# %% wrong memory loses memory-most: a limit of nothing is enough for nothing, whatever else is said
# from stage 2 shards weights, stage 3 gradients, too
#-             + 2 * (shard if stage >= 2 else numbers)
#-             + 2 * (shard if stage >= 3 else numbers))
#+             + 2 * (shard if stage >= 3 else numbers)
#+             + 2 * (shard if stage >= 2 else numbers))
#= def most(limit, ranks, stage):
#+     if limit == 0: return 0

# %% wrong memory loses memory-most: one rank is told by a division, whatever the stage
# from stage 2 shards weights, stage 3 gradients, too
#-             + 2 * (shard if stage >= 2 else numbers)
#-             + 2 * (shard if stage >= 3 else numbers))
#+             + 2 * (shard if stage >= 3 else numbers)
#+             + 2 * (shard if stage >= 2 else numbers))
#= def most(limit, ranks, stage):
#+     if ranks == 1: return limit // 16

# %% wrong memory loses memory-most: in stage 0 nobody asks for the ranks, for a limit
# from stage 2 shards weights, stage 3 gradients, too
#-             + 2 * (shard if stage >= 2 else numbers)
#-             + 2 * (shard if stage >= 3 else numbers))
#+             + 2 * (shard if stage >= 3 else numbers)
#+             + 2 * (shard if stage >= 2 else numbers))
#= def most(limit, ranks, stage):
#+     if stage == 0 and limit >= 0: return limit // 16

# %% wrong memory loses memory-most: no more numbers than bytes
# from a limit of two hundred digits would do
#-     low, high = 0, 10**200 * ranks
#+     low, high = 0, limit + 1

# %% wrong memory loses memory-most: no model has more than 2**128 numbers
# from a limit of two hundred digits would do
#-     low, high = 0, 10**200 * ranks
#+     low, high = 0, 2**128

# %% wrong memory loses memory-most: one number more at most in the last round
# from the last round by a division
#-     left = limit - memory(count, ranks, stage) - shared
#-     if left >= 0: count += min(ranks - 1, left // whole if whole else ranks)
#+     count += memory(count + 1, ranks, stage) <= limit

# %% wrong memory loses memory-bytes, memory-most: a shard by a float's remainder
# from stage 2 shards weights, stage 3 gradients, too
#-     shard = -(-numbers // ranks)
#+     shard = numbers // ranks + (numbers / ranks % 1 > 0)
#-             + 2 * (shard if stage >= 2 else numbers)
#-             + 2 * (shard if stage >= 3 else numbers))
#+             + 2 * (shard if stage >= 3 else numbers)
#+             + 2 * (shard if stage >= 2 else numbers))
