// A CUDA device that does nothing, for fake tensors on a torch that was built without CUDA.
//
// torch asks a registered guard which device and stream are current, and registered hooks whether there is CUDA
// at all; a CPU build registers neither, and backward through a fake tensor ends the process. To be loaded after
// libtorch_cpu.so and before `import torch`, which looks for the hooks once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
const c10::Device ONLY{CUDA, 0};
const c10::Stream DEFAULT{c10::Stream::DEFAULT, ONLY};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return ONLY; }
  c10::Device getDevice() const override { return ONLY; }
  c10::Stream getStream(c10::Device) const noexcept override { return DEFAULT; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return DEFAULT; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
};

const bool registered = (c10::impl::registerDeviceGuard(CUDA, new Guard()), true);

}  // namespace

using at::CUDAHooksRegistry, at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks);
