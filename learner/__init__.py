"""SFT and GRPO on DeepSpeed; publishes weights."""
