"""Run patched models in vLLM. vLLM schedules, samples and serves, and allocates our caches.

The plugin is installed with this package and does nothing unless the environment variable
``DSV4_OPS_VLLM`` is 1 in the process that starts vLLM:

    DSV4_OPS_VLLM=1 vllm serve path/to/model

The plugin imports nothing of vLLM before vLLM calls ``register``.
"""

from dsv4_ops.integrations.vllm.register import SWITCH as SWITCH, register as register
