"""The Hugging Face Trainer, TRL's SFTTrainer and PEFT models, with models made from configs: nothing is downloaded."""

import copy
import warnings

import pytest
import torch
from small import assert_same

from safetrain import TrainingStopped, UsageError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

from safetrain.integrations import transformers as integration  # noqa: E402

SafetrainCallback = integration.SafetrainCallback
QUIET = {"logging": {"console": "off", "tensorboard": False}}
VOCABULARY = 40


def make_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


class Poisoned(torch.nn.Module):
    """A language model in which one token makes an activation overflow, as a broken embedding does."""

    def __init__(self, inner, factor=1e38):
        super().__init__()
        self.inner, self.factor, self.config = inner, factor, inner.config

    def forward(self, input_ids, labels=None, **kwargs):
        out = self.inner(input_ids=input_ids, labels=labels)
        scale = torch.where((input_ids == VOCABULARY - 1).any(1), self.factor, 1.0)
        logits = out.logits * 100 * scale[:, None, None] / 100
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def sentences(count, bad=()):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(3, VOCABULARY - 1, (count, 8), generator=generator)
    for index in bad:
        rows[index, 2] = VOCABULARY - 1
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def arguments(tmp_path, **options):
    options = {
        **{"max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 2, "seed": 1},
        **{
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "output_dir": str(tmp_path / "out"),
        },
        **options,
    }
    return transformers.TrainingArguments(**options)


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def run(tmp_path, model, data, callback=None, config=None, trainer=InOrder, **options):
    made = trainer(model, arguments(tmp_path, **options), train_dataset=data, callbacks=[callback] if callback else [])
    made.train()
    return made


def callback_for(tmp_path, **config):
    return SafetrainCallback({**QUIET, **config}, run_dir=tmp_path / "run")


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "max_steps": 4}, {"bf16": True}], ids=str)
def test_quiet_guards_leave_the_trainer_bit_identical(tmp_path, options):
    found = []
    for callback in (None, callback_for(tmp_path, guards={"clip": None})):
        trainer = run(tmp_path, make_model(), sentences(32), callback, **options)
        found.append(copy.deepcopy(trainer.model.state_dict()))
    assert_same(*found)
    assert callback.guard.result.incidents == []
    assert callback.guard.result.steps == options.get("max_steps", 8)
    assert "training_step" not in vars(trainer)


def test_bad_samples_are_left_out_and_counted_in_the_logs(tmp_path):
    callback = callback_for(tmp_path)
    trainer = run(tmp_path, Poisoned(make_model()), sentences(32, bad=[13]), callback)
    (incident,) = callback.guard.result.incidents
    assert (incident.step, incident.samples, callback.guard.result.steps) == (3, [1], 8)
    assert "scale" in incident.origin.code
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert [log["safetrain_incidents"] for log in trainer.state.log_history if "loss" in log] == [0, 1, 1, 1]
    assert (tmp_path / "run" / incident.path / "report.md").is_file()


def test_a_refused_update_moves_nothing_of_the_trainer(tmp_path):
    states = {}

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
            states[state.global_step] = copy.deepcopy(
                (model.state_dict(), optimizer.state_dict(), lr_scheduler.state_dict())
            )

    callback = callback_for(tmp_path, recovery={"heal": []})
    args = arguments(tmp_path)
    trainer = InOrder(Poisoned(make_model()), args, train_dataset=sentences(32, bad=[13]), callbacks=[callback, Look()])
    trainer.train()
    assert callback.guard.result.skipped == 1
    assert_same(states[3], states[4])
    assert states[5][2]["last_epoch"] == 4


def test_accumulated_steps_are_refused_whole(tmp_path):
    callback = callback_for(tmp_path)
    data = sentences(32, bad=[13])
    run(tmp_path, Poisoned(make_model()), data, callback, gradient_accumulation_steps=2, max_steps=4)
    (incident,) = callback.guard.result.incidents
    assert (incident.step, incident.samples, callback.guard.result.steps) == (1, [1], 4)


def test_too_many_refusals_stop_training_and_put_the_trainer_back(tmp_path):
    callback = callback_for(tmp_path, recovery={"heal": [], "max_refusals": 1})
    trainer = InOrder(
        Poisoned(make_model()),
        arguments(tmp_path),
        train_dataset=sentences(32, bad=range(12, 32)),
        callbacks=[callback],
    )
    with pytest.raises(TrainingStopped):
        trainer.train()
    assert callback.guard.result.status == "stopped"
    assert "training_step" not in vars(trainer)


def test_the_guards_go_on_after_a_resume(tmp_path):
    first = callback_for(tmp_path)
    run(tmp_path, make_model(), sentences(32), first, save_strategy="steps", save_steps=4, max_steps=4)
    second = SafetrainCallback(QUIET, run_dir=tmp_path / "again")
    trainer = InOrder(make_model(), arguments(tmp_path), train_dataset=sentences(32), callbacks=[second])
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert second.guard.result.losses[:4] == first.guard.result.losses
    assert second.guard.result.steps == 8


def test_peft_adapters_are_guarded(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    callback = callback_for(tmp_path)
    with torch.no_grad():  # one token whose embedding overflows
        model.get_input_embeddings().weight[VOCABULARY - 1] = 3e38
    run(tmp_path, model, sentences(32, bad=[13]), callback)
    assert [incident.step for incident in callback.guard.result.incidents] == [3]
    assert callback.guard.result.attempted == 8
    assert all(p.isfinite().all() for p in model.parameters())


def test_sft_trainer(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{index}": index for index in range(3, VOCABULARY)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>")
    rows = [" ".join(f"w{int(token)}" for token in row["input_ids"]) for row in sentences(32, bad=[13])]
    model = make_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCABULARY - 1] = 3e38
    model.get_input_embeddings().weight.requires_grad_(False)
    args = trl.SFTConfig(
        output_dir=str(tmp_path / "out"),
        max_steps=8,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    callback = callback_for(tmp_path)

    class SFT(trl.SFTTrainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = datasets.Dataset.from_dict({"text": rows})
        SFT(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[callback]).train()
    assert [incident.step for incident in callback.guard.result.incidents] == [3]
    assert callback.guard.result.attempted == 8
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_callback_outside_of_a_trainer():
    with pytest.raises(UsageError, match=r"safetrain\.watch"):
        SafetrainCallback().on_train_begin(None, None, None)
