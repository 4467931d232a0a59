// All of PyTorch's process-wide state that changes what a kernel computes or returns: the worker reads it,
// the device server sets it. One row each. For sources that include PyTorch: the log's own know only the
// numbers.
#pragma once
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

#include <array>
#include <optional>

#include "replay/csrc/log/log_format.h"

namespace understudy::replay {

enum class Scope { kProcess, kThread };

struct SettingRow {
  Setting setting;
  Scope scope;    // of a thread's: read where the script sets it; the server sets it on the executor's thread
  uint64_t most;  // the largest value there is
  uint64_t (*get)();
  void (*set)(uint64_t);
};

namespace setting_rows {

using at::Context;
using at::Float32Backend;
using at::Float32Op;

inline Context& context() { return at::globalContext(); }

template <class T, T (Context::*Get)() const, void (Context::*Set)(T)>
constexpr SettingRow plain(Setting setting, uint64_t most = 1) {
  return {setting, Scope::kProcess, most, [] { return static_cast<uint64_t>((context().*Get)()); },
          [](uint64_t value) { (context().*Set)(static_cast<T>(value)); }};
}
// Getters that look for a default are not const.
template <class T, T (Context::*Get)(), void (Context::*Set)(T)>
constexpr SettingRow found(Setting setting, T most) {
  return {setting, Scope::kProcess, static_cast<uint64_t>(most),
          [] { return static_cast<uint64_t>((context().*Get)()); },
          [](uint64_t value) { (context().*Set)(static_cast<T>(value)); }};
}
// PyTorch 2.11 has no DEFAULT.
template <class Precision>
constexpr uint64_t last_precision() {
  if constexpr (requires { Precision::DEFAULT; })
    return static_cast<uint64_t>(Precision::DEFAULT);
  else
    return static_cast<uint64_t>(Precision::BF16);
}
// What the new interface says of one backend's operators, inherited or not.
template <Float32Backend Backend, Float32Op Op>
constexpr SettingRow precision(Setting setting) {
  return {setting, Scope::kProcess, last_precision<at::Float32Precision>(),
          [] { return static_cast<uint64_t>(context().float32Precision(Backend, Op)); },
          [](uint64_t value) {
            context().setFloat32Precision(Backend, Op, static_cast<at::Float32Precision>(value));
          }};
}
// Nor a choice of convolutions by channel.
template <class AnyContext>
constexpr SettingRow depthwise(Setting setting) {
  if constexpr (requires(const AnyContext& c) { c.cudnnDepthwiseKernel(); }) {
    using Kernel = decltype(std::declval<const AnyContext&>().cudnnDepthwiseKernel());
    return plain<Kernel, &AnyContext::cudnnDepthwiseKernel, &AnyContext::setCuDNNDepthwiseKernel>(
        setting, static_cast<uint64_t>(Kernel::NATIVE));
  } else {
    return {setting, Scope::kProcess, 0, [] { return uint64_t{0}; }, [](uint64_t) {}};
  }
}
template <at::CuBLASReductionOption (Context::*Get)() const, void (Context::*Set)(bool, bool)>
constexpr SettingRow reduction(Setting setting) {
  return {setting, Scope::kProcess, 2, [] { return static_cast<uint64_t>((context().*Get)()); },
          [](uint64_t value) { (context().*Set)(value == 0, value != 2); }};
}

inline uint64_t get_priority_order() {
  uint64_t word = 0;
  for (const auto backend : context().sDPPriorityOrder()) word = word << 8 | static_cast<uint8_t>(backend);
  return word;
}
inline void set_priority_order(uint64_t word) {
  std::vector<int64_t> order(at::num_sdp_backends);
  for (size_t i = order.size(); i-- > 0; word >>= 8) {
    order[i] = static_cast<int64_t>(word & 255);
    TORCH_CHECK(order[i] < at::num_sdp_backends, "there is no attention backend ", order[i]);
  }
  context().setSDPPriorityOrder(order);
}
inline uint64_t get_deterministic() {
  return !context().deterministicAlgorithms() ? 0 : context().deterministicAlgorithmsWarnOnly() ? 2 : 1;
}
inline void set_matmul_precision(uint64_t value) {
  context().setFloat32MatmulPrecision(value == 0 ? "highest" : value == 1 ? "high" : "medium");
}
inline uint64_t get_default_dtype() {
  return static_cast<uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype()));
}
inline void set_default_dtype(uint64_t value) {
  const auto type = static_cast<c10::ScalarType>(value);
  TORCH_CHECK(c10::isFloatingType(type), "a default dtype must be a floating point type");
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(type));
}
// Of optional values 0 is none.
inline uint64_t get_sparse_invariants() {
  const auto value = context().checkSparseTensorInvariants();
  return value ? 1 + static_cast<uint64_t>(*value) : 0;
}
inline void set_sparse_invariants(uint64_t value) {
  context().setCheckSparseTensorInvariants(value == 0 ? std::nullopt : std::optional(value == 2));
}
inline uint64_t get_carveout() {
  const auto value = context()._SMCarveout_EXPERIMENTAL();
  return value ? 1 + static_cast<uint64_t>(static_cast<uint32_t>(*value)) : 0;
}
inline void set_carveout(uint64_t value) {
  context()._setSMCarveout_EXPERIMENTAL(value == 0 ? std::nullopt
                                                   : std::optional(static_cast<int32_t>(value - 1)));
}
inline uint64_t get_tf32_of_cudnn() { return context().allowTF32CuDNN(); }
inline uint64_t get_threads() { return static_cast<uint64_t>(at::get_num_threads()); }
inline void set_threads(uint64_t value) { at::set_num_threads(static_cast<int>(value)); }
// There is no way to ask for it.
inline uint64_t get_flush_denormal() { return 0; }
inline void set_flush_denormal(uint64_t value) { context().setFlushDenormal(value != 0); }

}  // namespace setting_rows

// In the order in which they are set: the older of two interfaces first, what is inherited before who
// inherits.
inline const std::array<SettingRow, kSettings>& torch_settings() {
  using namespace setting_rows;
  using S = Setting;
  static const std::array<SettingRow, kSettings> rows{{
      {S::kThreads, Scope::kThread, 1024, &get_threads, &set_threads},
      {S::kFlushDenormal, Scope::kThread, 1, &get_flush_denormal, &set_flush_denormal},
      {S::kDefaultDtype, Scope::kProcess, static_cast<uint64_t>(at::ScalarType::NumOptions) - 1,
       &get_default_dtype, &set_default_dtype},
      {S::kDeterministic, Scope::kProcess, 2, &get_deterministic,
       [](uint64_t value) { context().setDeterministicAlgorithms(value != 0, value == 2); }},
      plain<bool, &Context::deterministicFillUninitializedMemory,
            &Context::setDeterministicFillUninitializedMemory>(S::kFillUninitialized),
      {S::kMatmulPrecision, Scope::kProcess, 2,
       [] { return static_cast<uint64_t>(context().float32MatmulPrecision()); }, &set_matmul_precision},
      {S::kTf32Cudnn, Scope::kProcess, 1, &get_tf32_of_cudnn,
       [](uint64_t value) { context().setAllowTF32CuDNN(value != 0); }},
      plain<bool, &Context::allowTF32OneDNN, &Context::setAllowTF32OneDNN>(S::kTf32OneDnn),
      precision<Float32Backend::GENERIC, Float32Op::ALL>(S::kFloat32),
      precision<Float32Backend::MKLDNN, Float32Op::ALL>(S::kFloat32OneDnn),
      precision<Float32Backend::MKLDNN, Float32Op::CONV>(S::kFloat32OneDnnConvolution),
      precision<Float32Backend::MKLDNN, Float32Op::RNN>(S::kFloat32OneDnnRecurrent),
      precision<Float32Backend::MKLDNN, Float32Op::MATMUL>(S::kFloat32OneDnnProduct),
      precision<Float32Backend::CUDA, Float32Op::ALL>(S::kFloat32Cuda),
      precision<Float32Backend::CUDA, Float32Op::CONV>(S::kFloat32CudaConvolution),
      precision<Float32Backend::CUDA, Float32Op::RNN>(S::kFloat32CudaRecurrent),
      precision<Float32Backend::CUDA, Float32Op::MATMUL>(S::kFloat32CudaProduct),
      reduction<&Context::allowFP16ReductionCuBLAS, &Context::setAllowFP16ReductionCuBLAS>(
          S::kFloat16ReductionCublas),
      reduction<&Context::allowBF16ReductionCuBLAS, &Context::setAllowBF16ReductionCuBLAS>(
          S::kBFloat16ReductionCublas),
      plain<bool, &Context::allowFP16AccumulationCuBLAS, &Context::setAllowFP16AccumulationCuBLAS>(
          S::kFloat16AccumulationCublas),
      plain<bool, &Context::allowFP16ReductionCPU, &Context::setAllowFP16ReductionCPU>(
          S::kFloat16ReductionCpu),
      plain<bool, &Context::userEnabledMkldnn, &Context::setUserEnabledMkldnn>(S::kOneDnn),
      plain<bool, &Context::deterministicMkldnn, &Context::setDeterministicMkldnn>(S::kOneDnnDeterministic),
      plain<bool, &Context::userEnabledNNPACK, &Context::setUserEnabledNNPACK>(S::kNnpack),
      plain<bool, &Context::userEnabledCuDNN, &Context::setUserEnabledCuDNN>(S::kCudnn),
      plain<bool, &Context::benchmarkCuDNN, &Context::setBenchmarkCuDNN>(S::kCudnnBenchmark),
      plain<int, &Context::benchmarkLimitCuDNN, &Context::setBenchmarkLimitCuDNN>(S::kCudnnBenchmarkLimit,
                                                                                  INT32_MAX),
      plain<bool, &Context::deterministicCuDNN, &Context::setDeterministicCuDNN>(S::kCudnnDeterministic),
      depthwise<Context>(S::kCudnnDepthwise),
      plain<bool, &Context::immediateMiopen, &Context::setImmediateMiopen>(S::kMiopenImmediate),
      plain<bool, &Context::userEnabledFlashSDP, &Context::setSDPUseFlash>(S::kFlashAttention),
      plain<bool, &Context::userEnabledFA3SDP, &Context::setSDPUseFA3>(S::kFlashAttention3),
      plain<bool, &Context::userEnabledMemEfficientSDP, &Context::setSDPUseMemEfficient>(
          S::kMemoryEfficientAttention),
      plain<bool, &Context::userEnabledMathSDP, &Context::setSDPUseMath>(S::kMathAttention),
      plain<bool, &Context::userEnabledCuDNNSDP, &Context::setSDPUseCuDNN>(S::kCudnnAttention),
      plain<bool, &Context::userEnabledOverrideableSDP, &Context::setSDPUseOverrideable>(
          S::kOverrideableAttention),
      plain<bool, &Context::allowFP16BF16ReductionMathSDP, &Context::setAllowFP16BF16ReductionMathSDP>(
          S::kMathAttentionReduction),
      {S::kAttentionOrder, Scope::kProcess, ~0ull, &get_priority_order, &set_priority_order},
      plain<at::LinalgBackend, &Context::linalgPreferredBackend, &Context::setLinalgPreferredBackend>(
          S::kLinalgBackend, static_cast<uint64_t>(at::LinalgBackend::Magma)),
      found<at::BlasBackend, &Context::blasPreferredBackend, &Context::setBlasPreferredBackend>(
          S::kBlasBackend, at::BlasBackend::Ck),
      found<at::ROCmFABackend, &Context::getROCmFAPreferredBackend, &Context::setROCmFAPreferredBackend>(
          S::kRocmAttention, at::ROCmFABackend::Ck),
      {S::kSmCarveout, Scope::kProcess, 1ull << 32, &get_carveout, &set_carveout},
      plain<at::QEngine, &Context::qEngine, &Context::setQEngine>(S::kQuantizedEngine, 255),
      {S::kSparseInvariants, Scope::kProcess, 2, &get_sparse_invariants, &set_sparse_invariants},
  }};
  return rows;
}

// Nothing where PyTorch itself cannot tell: both interfaces to one thing were used, with different answers.
inline std::optional<uint64_t> value_of(const SettingRow& row) {
  try {
    return row.get();
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

}  // namespace understudy::replay
