"""Fine-tune BERT: warm-up, and no weight decay for biases and norms."""

from given import sentences
from transformers import BertConfig, BertForSequenceClassification

from hookline import Trainer

size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=100, **size))
trainer = Trainer(
    model, sentences(96), sentences(32), metrics=["Accuracy"],
    optimizer="AdamW", lr=5e-3, weight_decay=0.01, config={"SOLVER.WEIGHT_DECAY_BIAS": 0.0},
    lr_scheduler="WarmupLinearLR", warmup=0.1, clip_norm=1.0, length="10ep", batch_size=16,
    monitor="test/accuracy", eval_period="1ep", seed=1, output_dir="output/bert",
)  # fmt: skip
trainer.train()
