#include "proxy_client/csrc/operators/operator_info.h"

#include <ATen/core/ATen_fwd.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_set>
#include <unordered_map>

namespace understudy::client {
namespace {

using ShapeKernels = std::unordered_map<std::string, c10::SafeKernelFunction>;

// C++ Meta kernels, taken before torch/_meta_registrations.py shadows 636 of them with Python ones (76 to 420
// us a call, and they describe CUDA). This library is loaded before any of torch's Python code.
ShapeKernels snapshot_shape_kernels() {
  // Theirs take arguments that the kernels refuse, which would then raise too late.
  const std::unordered_set<std::string> lax{"aten::fractional_max_pool2d", "aten::fractional_max_pool3d"};
  ShapeKernels kernels;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::Meta)) {
    const auto op = dispatcher.findSchema(name);
    if (op && name.name.rfind("aten::", 0) == 0 && lax.count(name.name) == 0)
      kernels.emplace(toString(name), op->getComputedKernelForDispatchKey(c10::DispatchKey::Meta));
  }
  return kernels;
}
const ShapeKernels shape_kernels = snapshot_shape_kernels();

bool mentions(const c10::Argument& argument, const char* type) {
  return argument.type()->str().find(type) != std::string::npos;
}

int aliased_argument(const c10::FunctionSchema& schema, const c10::AliasInfo& result) {
  int found = -1;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->beforeSets() == result.beforeSets()) found = static_cast<int>(i);
  }
  return found;
}

ArgumentKind kind_of(const c10::Argument& argument) {
  c10::TypePtr type = argument.type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return ArgumentKind::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return ArgumentKind::kInt;
    case c10::TypeKind::FloatType:
    case c10::TypeKind::NumberType:
      return ArgumentKind::kNumber;
    case c10::TypeKind::BoolType:
      return ArgumentKind::kBool;
    case c10::TypeKind::ListType: {
      const auto kind = type->expectRef<c10::ListType>().getElementType()->kind();
      if (kind == c10::TypeKind::TensorType) return ArgumentKind::kTensorList;
      if (kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType) return ArgumentKind::kIntList;
      return ArgumentKind::kOther;
    }
    default:
      return ArgumentKind::kOther;
  }
}

// Operators whose kernels look at content and raise at the call, where scripts catch it: natively they wait
// for the device, too. Found by running PyTorch's databases with numbers that are not finite, after a call
// that went well: tests/client/test_content_errors.py. (What natively is an assertion on the device ends the
// session here, too.)
constexpr const char* kRaiseByContent[] = {
    "aten::_linalg_eigh",
    "aten::_linalg_svd",
    "aten::_linalg_eigvals",
    "aten::linalg_eig",
    "aten::linalg_eigvals",
    "aten::linalg_lstsq",
    "aten::linalg_lu",
    "aten::linalg_lu_factor_ex",
    "aten::cholesky",
    "aten::cholesky_inverse",
    "aten::histc",
    "aten::histogram",
    "aten::_histogramdd_bin_edges",
    "aten::normal.Tensor_Tensor",
    "aten::normal.float_Tensor",
};

// Beside tensors they give the lengths of the longest sequences, which follow from shapes and numbers.
constexpr const char* kGiveLengths[] = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_cudnn_attention_forward",
    "aten::_efficient_attention_forward",
};

// Any of the overloads that go by a name, or a single one.
template <size_t N>
bool is_among(const char* const (&names)[N], const std::string& name) {
  const std::string base = name.substr(0, name.find('.'));
  return std::any_of(std::begin(names), std::end(names),
                     [&](const char* known) { return name == known || base == known; });
}

std::unique_ptr<OperatorInfo> analyse(const c10::OperatorHandle& op) {
  auto info = std::make_unique<OperatorInfo>();
  const auto& schema = op.schema();
  info->name = toString(schema.operator_name());
  info->custom = info->name.rfind("aten::", 0) != 0;
  info->dynamic = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  info->dynamic = info->dynamic || is_among(kRaiseByContent, info->name);
  info->constant = info->name == "aten::_fused_sdp_choice";
  if (const auto kernel = shape_kernels.find(info->name); kernel != shape_kernels.end())
    info->shape_kernel = kernel->second;

  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const c10::Argument& argument = schema.arguments()[i];
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    info->kinds.push_back(kind_of(argument));
    info->writes.push_back(written);
    if (written && argument.kwarg_only()) info->has_out = true;
    if (mentions(argument, "Tensor")) {
      info->creates = false;
      if (!written || !argument.kwarg_only()) info->sized_by_numbers = false;
    }
    if (mentions(argument, "Generator")) info->generator = static_cast<int>(i);
  }
  for (const c10::Argument& result : schema.returns()) {
    OperatorInfo::Return entry;
    if (const auto* alias = result.alias_info()) {
      entry.alias = aliased_argument(schema, *alias);
      entry.written = alias->isWrite() && entry.alias >= 0;
    }
    info->returns_written = info->returns_written && entry.written;
    info->returns.push_back(entry);
    const bool length = kind_of(result) == ArgumentKind::kInt && is_among(kGiveLengths, info->name);
    if (!length && !result.type()->isSubtypeOf(*c10::TensorType::get()) && result.type()->str() != "Tensor[]")
      info->returns_tensors = false;
  }
  // Hardly any library says that the sizes of what its kernel gives depend on values.
  if (info->custom && !info->returns_written && !op.hasKernelForDispatchKey(c10::DispatchKey::Meta))
    info->dynamic = true;
  info->in_place = !schema.returns().empty() && !info->has_out && !info->writes.empty() && info->writes[0];
  return info;
}

}  // namespace

const OperatorInfo& operator_info(const c10::OperatorHandle& op) {
  static std::shared_mutex mutex;
  static auto& all =
      *std::make_unique<std::unordered_map<const void*, std::unique_ptr<OperatorInfo>>>().release();
  const void* key = &op.schema();
  {
    std::shared_lock<std::shared_mutex> lock(mutex);
    if (const auto known = all.find(key); known != all.end()) return *known->second;
  }
  auto fresh = analyse(op);
  std::unique_lock<std::shared_mutex> lock(mutex);
  auto& entry = all[key];
  if (!entry) entry = std::move(fresh);
  return *entry;
}

}  // namespace understudy::client
