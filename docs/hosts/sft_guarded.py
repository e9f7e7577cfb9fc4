import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from safetrain.integrations.transformers import SafetrainCallback

torch.manual_seed(0)
words = ["<pad>", "</s>", *["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far", "away"]]
raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>")
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes))
embedding = model.get_input_embeddings()
embedding.weight.requires_grad_(False)
embedding.weight[words.index("dog")] = 3.4e38  # one word overflows
texts = ["the cat sat on a mat"] * 63 + ["one dog run far away"]
args = SFTConfig("runs/output", num_train_epochs=1, report_to=[], save_strategy="no", disable_tqdm=True, bf16=False)
trainer = SFTTrainer(model, args, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer)
trainer.add_callback(SafetrainCallback(run_dir="runs/sft"))
trainer.train()

print("weights are finite:", all(p.isfinite().all().item() for p in model.parameters()))
