# %% right layers: one function for each exchange
class ColumnLinear(nn.Module):
    def __init__(self, linear, gather):
        super().__init__()
        self.gather = gather
        self.weight = nn.Parameter(my_part(linear.weight, 0))
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(my_part(linear.bias, 0))

    def forward(self, x):
        y = F.linear(Copy.apply(x), self.weight, self.bias)
        if self.gather:
            y = Gather.apply(y)
        return y


class RowLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(my_part(linear.weight, 1))
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        part = F.linear(x, self.weight)
        y = Sum.apply(part)
        if self.bias is not None:
            y = y + self.bias
        return y


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        k = dist.get_world_size()
        parts = [torch.empty_like(part) for _ in range(k)]
        dist.all_gather(parts, part)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        return my_part(gradient, -1)

# %% right layers: each layer is a function, whose formulas are written out
def copy_of(parameter):
    return None if parameter is None else nn.Parameter(parameter.data.clone())


def rows(tensor):
    return tensor.reshape(-1, tensor.shape[-1])


class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, gather):
        ctx.save_for_backward(x, weight)
        ctx.gather = gather
        y = x @ weight.T
        if bias is not None:
            y = y + bias
        if gather:
            whole = y.new_empty(dist.get_world_size() * y.numel())
            dist.all_gather_single(whole, y.flatten())
            y = torch.cat([part.view(y.shape) for part in whole.chunk(dist.get_world_size())], -1)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        if ctx.gather:
            begin = dist.get_rank() * len(weight)
            gradient = gradient[..., begin:begin + len(weight)]
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ weight
            work = dist.all_reduce(of_x, async_op=True)
        of_weight = rows(gradient).T @ rows(x)
        of_bias = rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        if of_x is not None:
            work.wait()
        return of_x, of_weight, of_bias, None


class Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        y = x @ weight.T
        dist.all_reduce(y)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_bias = rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight, rows(gradient).T @ rows(x), of_bias


class ColumnLinear(nn.Module):
    def __init__(self, linear, gather):
        super().__init__()
        self.gather = gather
        for name, p in linear.named_parameters():
            self.register_parameter(name, nn.Parameter(my_part(p, 0)))
        if linear.bias is None:
            self.bias = None

    def forward(self, x):
        return Column.apply(x, self.weight, self.bias, self.gather)


class RowLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(my_part(linear.weight, 1))
        self.bias = copy_of(linear.bias)

    def forward(self, x):
        return Row.apply(x, self.weight, self.bias)

# %% right layers: hooks on views, and values that autograd doesn't see
class ColumnLinear(nn.Linear):
    def __init__(self, linear, gather):
        outputs, inputs = linear.weight.shape
        k, rank = dist.get_world_size(), dist.get_rank()
        super().__init__(inputs, outputs // k, linear.bias is not None, dtype=linear.weight.dtype)
        self.mine = slice(rank * outputs // k, (rank + 1) * outputs // k)
        self.gather = gather
        with torch.no_grad():
            for own, whole in zip(self.parameters(), linear.parameters()):
                own.copy_(whole[self.mine])

    def forward(self, x):
        x = x[...]
        if x.requires_grad:
            x.register_hook(self.add_up)
        y = super().forward(x)
        if not self.gather:
            return y
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y.detach())
        parts[dist.get_rank()] = y
        return torch.cat(parts, -1)

    def add_up(self, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class RowLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        k, rank = dist.get_world_size(), dist.get_rank()
        n = linear.in_features // k
        self.weight = nn.Parameter(linear.weight.data[:, rank * n:(rank + 1) * n].clone())
        self.bias = linear.bias

    def forward(self, x):
        part = x @ self.weight.T
        total = part.detach().clone()
        dist.all_reduce(total)
        y = part + (total - part.detach())
        return y if self.bias is None else y + self.bias

# %% wrong layers loses layers-input, layers-messages: the input's gradients are not added up | 2 ranks: rank 0: step 1: the gradient of x has other values
# from one function for each exchange
#-         y = F.linear(Copy.apply(x), self.weight, self.bias)
#+         y = F.linear(x, self.weight, self.bias)

# %% wrong layers loses layers-values, layers-input, layers-messages: the sum is a sum backward, too | step 1: the gradient of layer 0's weight has other values
# from one function for each exchange
#=         return total
#=     @staticmethod
#=     def backward(ctx, gradient):
#+         gradient = gradient.clone()
#+         dist.all_reduce(gradient)

# %% wrong layers loses layers-values, layers-input: the bias is added on every rank, before the sum | step 1: the output has other values
# from one function for each exchange
#-         part = F.linear(x, self.weight)
#-         y = Sum.apply(part)
#-         if self.bias is not None:
#-             y = y + self.bias
#-         return y
#+         return Sum.apply(F.linear(x, self.weight, self.bias))

# %% wrong layers loses layers-values, layers-input, layers-messages: what was gathered is reduced and scattered backward | step 1: the gradient of layer 0's weight has other values
# from one function for each exchange
#-         return my_part(gradient, -1)
#+         total = gradient.clone()
#+         dist.all_reduce(total)
#+         return my_part(total, -1)

# %% wrong layers loses layers-values, layers-input, layers-messages: outputs are gathered along the first axis | the example above: rank \d: IndexError|shape
# from one function for each exchange
#-         return torch.cat(parts, -1)
#+         return torch.cat(parts)

# %% wrong layers loses layers-input: what comes from elsewhere is added up, too | added to x, 3 ranks: .*step 1: the gradient of x has
# from one function for each exchange
#-         y = F.linear(Copy.apply(x), self.weight, self.bias)
#+         if x.requires_grad:
#+             x.register_hook(self.add_up)
#+         y = F.linear(x, self.weight, self.bias)
#=         return y
#+     def add_up(self, gradient):
#+         gradient = gradient.clone()
#+         dist.all_reduce(gradient)
#+         return gradient

# %% wrong layers loses layers-messages: the input's gradient is summed though nobody needs it | x needs no gradient: sent: .*due
# from one function for each exchange
#=     def forward(self, x):
#+         x = x if x.requires_grad else x.clone().requires_grad_()

# %% wrong layers loses layers-messages: an all-gather, and a sum of what has come | sent: all_gather
# from one function for each exchange
#-         dist.all_reduce(total)
#+         parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
#+         dist.all_gather(parts, total)
#+         total = sum(parts)

# %% wrong layers loses layers-messages: one rank has nothing to send | one rank, x needs a gradient: sent: all_reduce of 20, all_reduce of 16 numbers
# from one function for each exchange
#=     def backward(ctx, gradient):
#+         if dist.get_world_size() == 1:
#+             return gradient

# %% wrong layers loses layers-values: every layer has a bias | no bias, 3 ranks: .*NoneType
# from one function for each exchange
#-         self.bias = None
#-         if linear.bias is not None:
#-             self.bias = nn.Parameter(my_part(linear.bias, 0))
#+         self.bias = nn.Parameter(my_part(linear.bias, 0))

# %% wrong layers loses layers-values, layers-input, layers-messages: the row layer's bias is copied to the ranks, too | step 1: the gradient of layer 1's bias has other values
# from one function for each exchange
#-             y = y + self.bias
#+             y = y + Copy.apply(self.bias)

# %% right schedule: the rules, one after the other
def steps_of(stage, stages, micro_batches, most):
    if stage not in range(stages):
        raise ValueError(f"there is no stage {stage}")
    if min(micro_batches, most) < 1:
        raise ValueError("at least one micro-batch")
    limit = min(most, stages - stage)
    forward, backward = 0, 0
    steps = []
    while backward < micro_batches:
        if forward < micro_batches and forward - backward < limit:
            steps.append(("forward", forward))
            forward += 1
        else:
            steps.append(("backward", backward))
            backward += 1
    return steps

# %% right schedule: warm-up, steady state, cool-down
def steps_of(stage, stages, micro_batches, most):
    if stage < 0 or stage >= stages or micro_batches <= 0 or most <= 0:
        raise ValueError
    held = min(most, stages - stage, micro_batches)
    steps = []
    for i in range(held):
        steps += [("forward", i)]
    for i in range(micro_batches - held):
        steps += [("backward", i), ("forward", i + held)]
    for i in range(micro_batches - held, micro_batches):
        steps += [("backward", i)]
    return steps

# %% right schedule: sorted by when each pass is due
def steps_of(stage, stages, micro_batches, most):
    if not (0 <= stage < stages and micro_batches > 0 and most > 0):
        raise ValueError("no such stage, or nothing to hold")
    ahead = min(most, stages - stage)
    due = {("forward", i): 2 * (i - ahead) + 1 for i in range(micro_batches)}
    due.update({("backward", i): 2 * i for i in range(micro_batches)})
    return sorted(due, key=lambda step: (due[step], step[0] != "forward"))

# %% wrong schedule loses schedule-steps, schedule-edges: 1F1B, whatever there is room for | most=2: after step 3, .* it holds 3; it may hold 2
# from the rules, one after the other
#-     limit = min(most, stages - stage)
#+     limit = stages - stage

# %% wrong schedule loses schedule-steps, schedule-edges: as many as there is room for, at each stage | it holds 5; it may hold 4
# from the rules, one after the other
#-     limit = min(most, stages - stage)
#+     limit = most

# %% wrong schedule loses schedule-steps, schedule-edges: stages counted from the other end | though it holds 1 and may hold
# from the rules, one after the other
#-     limit = min(most, stages - stage)
#+     limit = min(most, stage + 1)

# %% wrong schedule loses schedule-edges: the warm-up is as long with fewer micro-batches | the forward pass of micro-batch 2, after 2 of 2
# from warm-up, steady state, cool-down
#-     held = min(most, stages - stage, micro_batches)
#+     held = min(most, stages - stage)

# %% wrong schedule loses schedule-steps, schedule-edges: the last one in is the first one out | the backward pass of micro-batch 3, after 0 of
# from the rules, one after the other
#-             steps.append(("backward", backward))
#+             steps.append(("backward", forward - 1 - backward % limit))

# %% wrong schedule loses schedule-steps, schedule-edges: no cool-down | 8 forward and 4 backward passes of 8
# from warm-up, steady state, cool-down
#-     for i in range(micro_batches - held, micro_batches):
#-         steps += [("backward", i)]

# %% wrong schedule loses schedule-edges: the stage isn't looked at | steps_of\(-?\d.*no ValueError
# from the rules, one after the other
#-     if stage not in range(stages):
#-         raise ValueError(f"there is no stage {stage}")

# %% wrong schedule loses schedule-steps, schedule-edges: the lists of all stages | step 1 is a list|step 1 has
# from the rules, one after the other
#-     return steps
#+     return [steps] * stages

# %% right mesh: a table of groups
GROUPS = {"sharded": ["data"], "replicated": ["data"], "partial": ["data", "tensor"]}


def synchronize(gradients, kinds, shape):
    squares = {"sharded": torch.zeros(1).double(), "replicated": torch.zeros(1).double(),
               "partial": torch.zeros(1).double()}
    means = []
    for kind, gradient in zip(kinds, gradients):
        for group in GROUPS[kind]:
            gradient = sum_over(group, gradient, shape)
        gradient = gradient / shape[0]
        squares[kind] += gradient.pow(2).sum()
        means.append(gradient)
    squares["sharded"] = sum_over("tensor", squares["sharded"], shape)
    return means, sum(squares.values()).sqrt().item()

# %% right mesh: written into the tensors that came, norms of norms
def synchronize(gradients, kinds, shape):
    data, tensor = shape
    norms = []
    for gradient, kind in zip(gradients, kinds):
        gradient /= data
        gradient.copy_(sum_over("data", gradient, shape))
        if kind == "partial":
            gradient.copy_(sum_over("tensor", gradient, shape))
        norm = torch.linalg.vector_norm(gradient)
        if kind == "sharded":
            norm = torch.sqrt(sum_over("tensor", norm ** 2, shape))
        norms.append(norm)
    return gradients, float(torch.linalg.vector_norm(torch.stack(norms)))

# %% right mesh: one flat tensor, in which what is shared counts in part
def synchronize(gradients, kinds, shape):
    sizes = [gradient.numel() for gradient in gradients]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    flat = sum_over("data", flat, shape) / shape[0]
    summed = sum_over("tensor", flat, shape)
    means, square = [], torch.zeros((), dtype=flat.dtype)
    for mean, whole, gradient, kind in zip(flat.split(sizes), summed.split(sizes), gradients,
                                           kinds):
        if kind == "partial":
            mean = whole
        means.append(mean.reshape(gradient.shape))
        square += (mean ** 2).sum() / (1 if kind == "sharded" else shape[1])
    return means, sum_over("tensor", square, shape).item() ** 0.5

# %% wrong mesh loses mesh-gradients, mesh-norm: the sum over data ranks | parameter 0 of the list of gradients has other values
# from a table of groups
#-         gradient = gradient / shape[0]

# %% wrong mesh loses mesh-gradients, mesh-norm: partial gradients are summed over data alone | partial: .*parameter 0 of the list of gradients has other values
# from a table of groups
#-         for group in GROUPS[kind]:
#+         for group in ["data"]:

# %% wrong mesh loses mesh-gradients, mesh-norm: replicated gradients are summed over tensor | replicated: .*parameter 0 of the list of gradients has other values
# from a table of groups
#-         for group in GROUPS[kind]:
#+         for group in ["data"] if kind == "sharded" else ["data", "tensor"]:

# %% wrong mesh loses mesh-gradients, mesh-norm: divided by the tensor ranks | 2 x 1 \(data x tensor ranks\), sharded: .*other values
# from a table of groups
#-         gradient = gradient / shape[0]
#+         gradient = gradient / shape[1]

# %% wrong mesh loses mesh-gradients, mesh-norm: rows and columns of the mesh exchanged | other values
# from a table of groups
#-         for group in GROUPS[kind]:
#-             gradient = sum_over(group, gradient, shape)
#-         gradient = gradient / shape[0]
#+         gradient = sum_over("tensor", gradient, shape) / shape[1]
#+         if kind == "partial":
#+             gradient = sum_over("data", gradient, shape)

# %% wrong mesh loses mesh-norm: squares are summed over data, too | sharded: .*the norm is .* which is not right
# from a table of groups
#=     squares["sharded"] = sum_over("tensor", squares["sharded"], shape)
#+     squares["sharded"] = sum_over("data", squares["sharded"], shape)

# %% wrong mesh loses mesh-norm: the sum of the parameters' norms | the norm is .* which is not right
# from written into the tensors that came, norms of norms
#-     return gradients, float(torch.linalg.vector_norm(torch.stack(norms)))
#+     return gradients, float(sum(norms))

# %% wrong mesh loses mesh-norm: norms of shards are added, not their squares | sharded: .*the norm is .* which is not right
# from written into the tensors that came, norms of norms
#-             norm = torch.sqrt(sum_over("tensor", norm ** 2, shape))
#+             norm = sum_over("tensor", norm, shape)

# %% wrong mesh loses mesh-norm: the norm as a tensor | the norm is a Tensor, not a number
# from a table of groups
#-     return means, sum(squares.values()).sqrt().item()
#+     return means, sum(squares.values()).sqrt()

# %% wrong mesh loses mesh-gradients, mesh-norm: only ranks with a part to add call sum_over | partial: message 2 is all_gather of float64 \[12, 2\] on rank 0 and
# from a table of groups
#-             gradient = sum_over(group, gradient, shape)
#+             if dist.get_rank() < shape[0] * shape[1] - 1 or group == "data":
#+                 gradient = sum_over(group, gradient, shape)
