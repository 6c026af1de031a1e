"""Two devices: XLA reads the flag when JAX is first used, which no other tests do."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
