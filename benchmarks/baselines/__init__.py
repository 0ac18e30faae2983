"""What we are compared with: vLLM, FlashMLA, DeepGEMM, Hugging Face."""
