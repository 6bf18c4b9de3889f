// What torch asks of a CUDA device before it differentiates or copies, answered as if there were one that does nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
struct Pretended : public NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return Device(DeviceType::CUDA, 0); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Pretended);
}  // namespace c10::impl

namespace at {
struct CUDAHooks : public CUDAHooksInterface {  // torch looks for the class of this name
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
