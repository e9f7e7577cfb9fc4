from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recipe_runs import load, run
from torch import nn

from safetrain import SafeTrainer
from safetrain.cli.main import run as safetrain

ROOT = Path(__file__).parents[2]
CONTEXT = 32


recipe = SimpleNamespace(**runpy.run_path(str(ROOT / "recipes" / "char_gpt.py")))


class Lookup(nn.Module):
    """Logits that depend on the current token only, so that the loss is easy to compute by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(recipe.VOCAB_SIZE, recipe.VOCAB_SIZE))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


def documents(*indices: int, **options: object) -> dict[str, torch.Tensor]:
    data = recipe.Documents("train", CONTEXT, 100, **options)
    return {"tokens": torch.stack([data[i]["tokens"] for i in indices])}


def test_encode():
    assert recipe.encode(" ~") == [1, recipe.VOCAB_SIZE - 1]
    assert recipe.encode("é\n") == recipe.encode("??")


def test_documents_are_padded_at_the_end():
    data = recipe.Documents("train", CONTEXT, 500)
    assert len(data) == 500
    for i in range(len(data)):
        tokens = data[i]["tokens"]
        num_real = len(data.texts[i])
        assert tokens.shape == (CONTEXT + 1,)
        assert tokens.dtype == torch.long
        assert 2 <= num_real <= CONTEXT + 1  # at least one character to predict
        assert tokens.max() < recipe.VOCAB_SIZE
        assert (tokens[:num_real] != recipe.PAD).all()
        assert (tokens[num_real:] == recipe.PAD).all()


def test_splits_share_no_topic_and_together_hold_every_topic():
    train, evaluation = recipe.split_topics("train"), recipe.split_topics("eval")
    assert not set(train) & set(evaluation)
    assert set(train) | set(evaluation) == set(recipe.topics)


def test_the_same_arguments_give_the_same_documents():
    assert recipe.Documents("eval", CONTEXT, 50).texts == recipe.Documents("eval", CONTEXT, 50).texts


@pytest.mark.parametrize(("split", "num_documents"), [("test", 10), ("eval", 10**9)])
def test_invalid_arguments_are_refused(split: str, num_documents: int):
    with pytest.raises(ValueError, match=r"split"):
        recipe.Documents(split, CONTEXT, num_documents)


def test_model_gives_logits_for_every_position():
    model = recipe.CharGPT(context=CONTEXT)
    assert model(torch.zeros(3, CONTEXT, dtype=torch.long)).shape == (3, CONTEXT, recipe.VOCAB_SIZE)
    assert model(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5, recipe.VOCAB_SIZE)
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 130_000


def test_model_does_not_look_ahead():
    model = recipe.CharGPT(context=CONTEXT).eval()
    tokens = torch.randint(1, recipe.VOCAB_SIZE, (1, CONTEXT))
    changed = tokens.clone()
    changed[0, 20:] = 1
    torch.testing.assert_close(model(tokens)[0, :20], model(changed)[0, :20])
    assert not torch.equal(model(tokens)[0, 20:], model(changed)[0, 20:])


def test_dropout_acts_in_training_only():
    model = recipe.CharGPT(context=CONTEXT, dropout=0.5)
    tokens = torch.randint(1, recipe.VOCAB_SIZE, (1, CONTEXT))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    torch.testing.assert_close(model(tokens), model(tokens))


def test_loss_is_the_mean_over_documents_of_the_mean_over_characters():
    model, batch = Lookup(), documents(*range(40))
    log_p = model.table.detach().log_softmax(-1)
    per_document = []
    for tokens in batch["tokens"].tolist():
        real = [t for t in tokens if t != recipe.PAD]
        per_document.append([-log_p[a, b].item() for a, b in itertools.pairwise(real)])
    characters = [nll for document in per_document for nll in document]

    output = recipe.document_loss(model, batch)

    assert len({len(document) for document in per_document}) > 1  # otherwise the two means would be equal
    expected = sum(sum(document) / len(document) for document in per_document) / len(per_document)
    assert output["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert output["bits_per_char"].item() == pytest.approx(sum(characters) / len(characters) / math.log(2), rel=1e-5)
    assert not output["bits_per_char"].requires_grad


def test_a_new_model_predicts_uniformly():
    model = recipe.CharGPT(context=CONTEXT)
    loss = recipe.document_loss(model, documents(*range(32)))["loss"].item()
    assert loss == pytest.approx(math.log(recipe.VOCAB_SIZE), abs=0.5)


def test_an_empty_document_is_nan_and_no_other_is():
    model = Lookup()
    rows = [documents(i, empty_documents=[5]) for i in range(4, 8)]
    finite = [bool(recipe.document_loss(model, row)["loss"].isfinite()) for row in rows]
    assert finite == [True, False, True, True]


def test_an_empty_document_makes_every_gradient_nan():
    model = recipe.CharGPT(context=CONTEXT)
    loss = recipe.document_loss(model, documents(4, 5, 6, empty_documents=[5]))["loss"]
    loss.backward()
    assert loss.isnan()
    assert all(p.grad.isnan().any() for p in model.parameters())


# ---- padding in front ------------------------------------------------------------------------------------------------


def test_left_padded_documents_hold_the_same_text():
    plain, left = (recipe.Documents("train", CONTEXT, 500, left_padded=which) for which in ((), range(500)))
    short = next(i for i in range(500) if len(plain.texts[i]) < CONTEXT)
    length = len(plain.texts[short])
    assert torch.equal(plain[short]["tokens"][:length], left[short]["tokens"][-length:])
    assert (left[short]["tokens"][:-length] == recipe.PAD).all()


def test_a_finite_padding_mask_hides_padding_in_front():
    model = recipe.CharGPT(context=CONTEXT, padding_mask=-1e4).eval()
    tokens = torch.randint(1, recipe.VOCAB_SIZE, (1, CONTEXT))
    tokens[0, :5] = recipe.PAD
    before = model(tokens)
    with torch.no_grad():
        model.token_embedding.weight[recipe.PAD] += 1
    assert torch.equal(before[0, 5:], model(tokens)[0, 5:])
    assert before.isfinite().all()


def test_without_padding_the_mask_changes_nothing():
    tokens = torch.randint(1, recipe.VOCAB_SIZE, (2, CONTEXT))
    model = recipe.CharGPT(context=CONTEXT)
    expected = model(tokens)
    model.padding_mask = -torch.inf
    torch.testing.assert_close(model(tokens), expected)


def test_an_infinite_padding_mask_is_nan_for_padding_in_front_only():
    model = recipe.CharGPT(context=CONTEXT, padding_mask=-torch.inf)
    data = recipe.Documents("train", CONTEXT, 500, left_padded=range(500))
    short = next(i for i in range(500) if len(data.texts[i]) < CONTEXT)
    left = {"tokens": data[short]["tokens"][None]}
    assert recipe.document_loss(model, left)["loss"].isnan()
    assert recipe.document_loss(model, documents(short))["loss"].isfinite()


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_text_file_is_split_into_documents(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"paragraph number {i} says something" for i in range(20)), encoding="utf-8")
    train = recipe.Documents("train", 64, None, path=str(path))
    evaluation = recipe.Documents("eval", 64, None, path=str(path))
    assert (len(train), len(evaluation)) == (16, 4)
    assert evaluation.texts[0] == "paragraph number 4 says something"


def test_a_token_file_is_cut_into_overlapping_pieces(tmp_path: Path):
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    train, evaluation = (recipe.TokenFile(str(path), split, context=16) for split in ("train", "eval"))
    assert (len(train), len(evaluation)) == (899 // 16, 99 // 16)
    assert train[0]["tokens"].tolist() == list(range(17))
    assert train[1]["tokens"][0] == train[0]["tokens"][-1]
    assert evaluation[0]["tokens"].tolist() == list(range(900, 917))
    assert isinstance(train.tokens, np.memmap)


def test_a_model_trains_on_a_token_file(tmp_path: Path):
    path = tmp_path / "tokens.bin"
    (np.arange(4000) % 300).astype(np.uint16).tofile(path)
    target = str(ROOT / "recipes" / "char_gpt.py")
    data = {"_target_": f"{target}:TokenFile", "path": str(path), "context": 16}
    config = {
        "seed": 0,
        "model": {"_target_": f"{target}:CharGPT", "context": 16, "width": 32, "vocab_size": 300},
        "data": {"train": {**data, "split": "train"}, "eval": {**data, "split": "eval"}, "batch_size": 16},
        "loss": {"_target_": f"{target}:next_token_loss"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-2},
        "loop": {"max_steps": 60},
        "logging": {"console": "off", "tensorboard": False},
    }
    result = SafeTrainer(config=config, run_dir=tmp_path / "run").fit()
    assert result.healthy
    assert result.evaluations[-1]["loss"] < 3 < math.log(300) - 2


def test_the_config_for_token_files_in_the_documentation_trains(tmp_path: Path):
    assert safetrain(["recipes", "cp", "char_gpt", str(tmp_path)]) == 0
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    shown = text.partition("```yaml\n")[2].partition("```")[0]
    (np.arange(4000) % 300).astype(np.uint16).tofile(tmp_path / "corpus.bin")
    (tmp_path / "my_corpus.yaml").write_text(
        shown.replace("corpus.bin", str(tmp_path / "corpus.bin")), encoding="utf-8"
    )
    result = run(load(tmp_path / "my_corpus.yaml", "loop.max_steps=1", "data.batch_size=2"), tmp_path / "run")
    assert result.healthy
    assert "bits_per_token" in result.evaluations[-1]
