"""Baselines: vLLM, FlashMLA, DeepGEMM and Hugging Face."""
