"""Fine-tune a model with LoRA; checkpoints hold the adapter alone."""

from given import sentences
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from hookline import Trainer

size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
base = BertForSequenceClassification(BertConfig(vocab_size=100, **size))
trainer = Trainer(
    get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"])), sentences(96),
    sentences(32), metrics=["Accuracy"], optimizer="AdamW", lr=1e-2, length="4ep", seed=1, output_dir="output/lora",
    config={"CHECKPOINT.TRAINABLE_ONLY": True},
)  # fmt: skip
trainer.train()
