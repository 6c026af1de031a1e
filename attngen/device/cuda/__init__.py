"""The GPU: NVRTC from the wheel, cubins cached on disk, launches through the driver; all by way of cuda.core."""

from attngen.device.cuda.device import CudaDevice

__all__ = ["CudaDevice"]
