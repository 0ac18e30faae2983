"""Run patched models in vLLM. vLLM schedules, samples and serves, and allocates our caches.

The plugin is installed with this package. It does nothing if the environment variable
``DSV4_OPS_VLLM`` is 0 or not set in the process that starts vLLM. This command turns it on:

    DSV4_OPS_VLLM=1 vllm serve path/to/model

The plugin imports nothing of vLLM before vLLM calls ``register``.
"""

from dsv4_ops.integrations.vllm.register import SWITCH as SWITCH, register as register
