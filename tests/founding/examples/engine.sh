vllm serve model --enable-lora --max-lora-rank 64
