import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")  # connects the processes; on GPUs by "nccl"
rank = dist.get_rank()

torch.manual_seed(0)
x = torch.randn(640, 20)
y = (x.sum(dim=1) > 0).long()
data = TensorDataset(x, y)
sampler = DistributedSampler(data)  # a share of the data for each rank
loader = DataLoader(data, batch_size=32, sampler=sampler)

torch.manual_seed(rank)  # on purpose: each rank begins with different weights
net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2))
print(f"rank {rank} begins with the weight {net[0].weight[3, 0].item():.3f}")

model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(5):
    sampler.set_epoch(epoch)  # a different order each epoch, the same on all ranks
    for x_shard, y_shard in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x_shard), y_shard)
        loss.backward()
        optimizer.step()

print(f"rank {rank} ends with the weight {net[0].weight[3, 0].item():.3f}")
dist.destroy_process_group()
