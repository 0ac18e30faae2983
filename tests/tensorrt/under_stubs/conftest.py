"""Import torch-tensorrt before any check of this folder."""

from tests.tensorrt import stubs

stubs.install()
