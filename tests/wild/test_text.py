"""Models of transformers, peft and x_transformers."""

import pytest
import torch
from torch import nn
from wild_cases import Net, Wild, check_failure, check_healthy

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries warn of is theirs
wild = Wild()


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, **options))


@wild.fails(
    "transformers", "loss_utils.py", "nll_loss_forward", "empty_reduction", [], "batch['labels'][:, 1:8]: 21 values"
)
def no_label_left():
    def loss_fn(model, batch):
        return model(**batch).loss  # here

    ids = torch.randint(0, 50, (3, 8))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, -100)}
    return gpt2(), loss_fn, batch


@wild.fails("transformers", "modeling_clip.py", "exp", "exp_overflow", [], "parameter logit_scale = 100")
def logit_scale_of_a_hundred():
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "vocab_size": 50, "max_position_embeddings": 8, "eos_token_id": 49}
    image = {**small, "image_size": 8, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=8))
    nn.init.constant_(model.logit_scale, 100.0)

    def loss_fn(model, batch):
        return model(**batch, return_loss=True).loss  # here

    ids = torch.randint(0, 48, (4, 6))
    ids[:, -1] = 49
    return model, loss_fn, {"input_ids": ids, "pixel_values": torch.randn(4, 3, 8, 8)}


@wild.fails("transformers", "loss_ctc.py", "ctc_loss", "infeasible_target", [1], "batch['labels'][1, :]")
def transcript_longer_than_its_audio():
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    features = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    quiet = {"mask_time_prob": 0.0, "layerdrop": 0.0, "ctc_loss_reduction": "mean"}
    model = Wav2Vec2ForCTC(Wav2Vec2Config(vocab_size=12, **small, **features, **positions, **quiet))

    def loss_fn(model, batch):
        return model(batch["input_values"], labels=batch["labels"]).loss  # here

    labels = torch.full((3, 24), -100)
    labels[:, :4] = torch.randint(1, 12, (3, 4))
    labels[1] = torch.randint(1, 12, (24,))
    return model, loss_fn, {"input_values": torch.randn(3, 200), "labels": labels}


@wild.fails("transformers", "", "div", "division_by_zero", [1], "batch[0][1, :]: 4 values, all 0")
def boxes_of_an_empty_row():
    from transformers.loss.loss_for_object_detection import generalized_box_iou

    def loss_fn(model, batch):
        x, y = batch
        low, size = (model(x) / x.sum(1, keepdim=True)).split(2, dim=1)  # here
        return 1 - generalized_box_iou(torch.cat([low, low + size.abs()], 1), y).diagonal().mean()

    x = torch.rand(4, 4)
    x[1] = 0
    return Net(4, 4), loss_fn, (x, torch.tensor([[0.0, 0, 1, 1]]).repeat(4, 1))


@wild.fails("transformers", "", "div", "division_by_zero", [1], "batch['obs'][1, :]: 4 values, all 0")
def row_of_a_batch_encoding():
    from transformers import BatchEncoding

    return Net(4, 1), unit_length, BatchEncoding(observations())


@wild.fails("tensordict", "", "div", "division_by_zero", [1], "batch['obs'][1, :]: 4 values, all 0")
def row_of_a_tensordict():
    from tensordict import TensorDict

    return Net(4, 1), unit_length, TensorDict(observations(), batch_size=[5])


def unit_length(model, batch):
    unit = batch["obs"] / batch["obs"].norm(dim=1, keepdim=True)  # here
    return (model(unit).squeeze(1) - batch["reward"]).square().mean()


def observations():
    obs = torch.randn(5, 4)
    obs[1] = 0
    return {"obs": obs, "reward": torch.randn(5)}


class Adapted(Net):
    def forward(self, x):
        return self.head(torch.relu(self.body(x)))  # here


@wild.fails("peft", "dora.py", "div", "division_by_zero", [])
def row_of_weights_that_is_zero():
    from peft import LoraConfig, get_peft_model

    base = Adapted()
    with torch.no_grad():
        base.body.weight[5] = 0
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["body"], use_dora=True))
    return model, lambda model, x: model(x).square().mean(), torch.randn(5, 4)


@wild.fails("x_transformers", "x_transformers.py", "parameter", "corrupt_parameter", [], "token_emb.emb.weight[0, 3]")
def corrupt_embedding():
    from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(num_tokens=30, max_seq_len=16, attn_layers=Decoder(dim=16, depth=1, heads=2))
    with torch.no_grad():
        model.token_emb.emb.weight[0, 3] = float("nan")

    def loss_fn(model, x):
        return nn.functional.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:])  # here

    return model, loss_fn, torch.arange(24).reshape(3, 8)


@wild.passes("transformers")
def padded_sequence_without_labels():
    ids = torch.randint(0, 50, (3, 8))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, :4] = 0
    labels[0] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return gpt2(attn_implementation="eager"), lambda model, batch: model(**batch).loss, batch


@wild.passes("transformers")
def sentence_of_one_token():
    from transformers import BertConfig, BertForSequenceClassification

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=30, max_position_embeddings=16, attn_implementation="eager", **small)
    ids = torch.randint(0, 30, (3, 8))
    mask = torch.ones_like(ids)
    mask[1, 1:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 0])}
    return BertForSequenceClassification(config), lambda model, batch: model(**batch).loss, batch


@wild.passes("x_transformers")
def sequence_that_is_all_padding():
    from x_transformers import Encoder, TransformerWrapper

    model = TransformerWrapper(num_tokens=30, max_seq_len=16, attn_layers=Encoder(dim=16, depth=1, heads=2))
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1] = False
    return model, lambda model, b: model(b[0], mask=b[1]).square().mean(), (torch.randint(0, 30, (3, 8)), mask)


@wild.each_failure()
def test_failure(case):
    check_failure(case)


@wild.each_healthy()
def test_healthy(library, build):
    check_healthy(library, build)
