"""Baselines: vLLM, FlashMLA, DeepGEMM, Humming and Hugging Face."""
