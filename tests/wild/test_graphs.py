"""Graph networks of torch_geometric."""

import pytest
import torch
from torch import nn
from wild_cases import Net, Wild, check_failure, check_healthy

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries warn of is theirs
wild = Wild()


@wild.fails("torch_geometric", "graph_norm.py", "div", "division_by_zero", came_from="batch['x'][2, :]")
def graph_of_one_node():
    from torch_geometric.nn.norm import GraphNorm

    norm = GraphNorm(3, eps=0.0)

    def loss_fn(model, batch):
        return norm(model(batch["x"]), batch["graph"]).square().mean()  # here

    return Net(), loss_fn, {"x": torch.randn(6, 4), "graph": torch.tensor([0, 0, 1, 2, 2, 2])}


@wild.fails("torch_geometric", "gcn_conv.py", "pow", "invalid_domain", came_from="batch['w']")
def degree_below_zero():
    from torch_geometric.nn import GCNConv

    def loss_fn(model, batch):
        return model(batch["x"], batch["edges"], batch["w"]).square().mean()  # here

    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    batch = {"x": torch.randn(4, 4), "edges": edges, "w": torch.tensor([1.0, -0.5, 1.0, 1.0])}
    return GCNConv(4, 2, add_self_loops=False), loss_fn, batch


@wild.fails("torch_geometric", "", "reciprocal", "division_by_zero", [1], "batch.pos[3, :]")
def two_atoms_in_one_place():
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GCNConv(3, 4)
            self.head = nn.Linear(4, 1)

        def forward(self, batch):
            nodes = self.conv(batch.x, batch.edge_index).relu()
            return self.head(global_mean_pool(nodes, batch.batch)).squeeze(1)

    def loss_fn(model, batch):
        start, end = batch.edge_index
        near = 1 / (batch.pos[start] - batch.pos[end]).norm(dim=1)  # here
        return nn.functional.mse_loss(model(batch), batch.y) * near.mean()

    ring = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = [Data(x=torch.randn(3, 3), pos=torch.randn(3, 3), edge_index=ring, y=torch.randn(1)) for _ in range(4)]
    graphs[1].pos[1] = graphs[1].pos[0]
    return Pooled(), loss_fn, Batch.from_data_list(graphs)


@wild.passes("torch_geometric")
def isolated_nodes():
    from torch_geometric.nn import GATConv, GCNConv

    model = nn.ModuleList([GCNConv(4, 4, add_self_loops=False), GATConv(4, 2, add_self_loops=False)])

    def loss_fn(model, batch):
        hidden = model[0](batch["x"], batch["edges"]).relu()
        return model[1](hidden, batch["edges"]).square().mean()

    return model, loss_fn, {"x": torch.randn(5, 4), "edges": torch.tensor([[0, 1], [1, 0]])}


@wild.each_failure()
def test_failure(case):
    check_failure(case)


@wild.each_healthy()
def test_healthy(library, build):
    check_healthy(library, build)
