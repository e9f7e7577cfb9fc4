"""Where the operand comes from softmax, sigmoid or exp, the fix is the fused form, and its gradient is right at a confidently wrong
sample."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from safetrain.forensics import investigate
from safetrain.forensics.frames import Place
from safetrain.forensics.substitutes import SafeVariant

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])
HALF = (Y > 0).float()


def scores(model):
    return model(X)


def log_of_softmax(z):
    return -(F.one_hot(Y, 3) * torch.log(z.softmax(1))).sum(1).mean()


def indexed(z):
    p = F.softmax(z, dim=1)
    return -p[range(6), Y].log().mean()


def by_hand(z):
    e = torch.exp(z)
    p = e / e.sum(1, keepdim=True)
    return -torch.log(p.gather(1, Y[:, None])).mean()


def log_of_sum(z):
    return (torch.log(torch.exp(z).sum(1)) - z.gather(1, Y[:, None])[:, 0]).mean()


def log_of_sigmoid(z):
    p = torch.sigmoid(z[:, 0])
    return -(HALF * torch.log(p) + (1 - HALF) * torch.log(1 - p)).mean()


def sigmoid_by_hand(z):
    p = 1 / (1 + torch.exp(-z[:, 0]))
    return -(HALF * torch.log(p) + (1 - HALF) * torch.log(1 - p)).mean()


def soft_plus(z):
    return (torch.log(1 + torch.exp(z[:, 0])) - HALF * z[:, 0]).mean()


def classes(z):
    return F.cross_entropy(z, Y)


def halves(z):
    return F.binary_cross_entropy_with_logits(z[:, 0], HALF)


CASES = {
    **dict.fromkeys([log_of_softmax, indexed, by_hand, log_of_sum], classes),
    **dict.fromkeys([log_of_sigmoid, sigmoid_by_hand, soft_plus], halves),
}


def model_that_is_sure():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.mul_(300)
    return model


@pytest.mark.parametrize("loss", CASES, ids=lambda loss: loss.__name__)
def test_the_verified_fix_is_the_fused_form_and_has_its_gradient(loss):
    model = model_that_is_sure()
    incident = investigate(model, lambda model, batch: loss(scores(model)), (X, Y))
    (remedy,) = [remedy for remedy in incident.remedies if remedy.name == "fused_form"]
    assert remedy.finite
    assert "in one piece" in incident.fix
    place = Place(incident.origin.file, incident.origin.line, incident.origin.code, "")
    with SafeVariant(place, is_fused=True):
        patched = loss(scores(model))
    reference = CASES[loss](scores(model))
    torch.testing.assert_close(patched, reference, rtol=1e-4, atol=1e-4)
    wanted, found = (torch.autograd.grad(value, model.weight)[0] for value in (reference, patched))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert wanted.norm() > 0.1


@pytest.mark.parametrize("loss", CASES, ids=lambda loss: loss.__name__)
def test_where_nothing_is_wrong_the_fused_form_is_the_same_function(loss):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    plain = loss(scores(model))
    lines = range(loss.__code__.co_firstlineno, loss.__code__.co_firstlineno + 5)
    for line in lines:
        with SafeVariant(Place(__file__, line, "", ""), is_fused=True):
            torch.testing.assert_close(loss(scores(model)), plain)


def test_what_is_changed_in_place_is_no_longer_that_function():
    z = torch.zeros(3, requires_grad=True)

    def changed():
        p = torch.sigmoid(z).clone()
        p += 0.5
        return torch.log(p)

    line = changed.__code__.co_firstlineno + 3
    with SafeVariant(Place(__file__, line, "", ""), is_fused=True) as variant:
        assert torch.equal(changed(), torch.zeros(3))
    assert variant.num_hits == 0


def test_below_the_floor_of_a_log_the_gradient_goes_on():
    x = torch.tensor([0.0, -1.0, 2.0], requires_grad=True)
    line = test_below_the_floor_of_a_log_the_gradient_goes_on.__code__.co_firstlineno + 4
    with SafeVariant(Place(__file__, line, "", ""), {"log"}):
        torch.log(x).sum().backward()
    assert x.grad.isfinite().all()
    assert (x.grad > 0).all()
