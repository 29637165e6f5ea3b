"""GPT-2 on mpx: a comparison of precision recipes that differ in nothing else, and a training run of any size.

Read the files in this order.

- The comparison: `model`, `loss`, `recipes`, `training` with `devices`, then the command `compare` with `report`.
- The data: `text`, `tokenizers`, `shards`, the command `data`, and `loader`.
- The run: `checkpoints`, `processes`, `run_log` with `meter` and `output`, `runs`, the command `train`, and `launch`.
- Afterwards: `sampling`, `multiple_choice`, and the command `evaluate`.
"""
