#include "proxy_client/csrc/distributed/collective_types.h"

#include "proxy_client/csrc/device/device.h"

namespace understudy::client {
namespace {

using c10d::ReduceOp;

const char* bitwise_name(ReduceOp::RedOpType type) {
  switch (type) {
    case ReduceOp::BAND:
      return "BAND";
    case ReduceOp::BOR:
      return "BOR";
    case ReduceOp::BXOR:
      return "BXOR";
    default:
      return nullptr;
  }
}

}  // namespace

void check_collective_type(const at::Tensor& tensor) {
  switch (c10::toRealValueType(tensor.scalar_type())) {
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kFloat8_e5m2:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2fnuz:
      return;
    default:
      TORCH_CHECK_WITH(TypeError, false, "Input tensor data type is not supported for NCCL process group: ",
                       tensor.scalar_type());
  }
}

void check_reduction(const ReduceOp& op, const at::Tensor& tensor) {
  const auto type = static_cast<ReduceOp::RedOpType>(op);
  const at::ScalarType element = c10::toRealValueType(tensor.scalar_type());
  TORCH_CHECK(!c10::isFloat8Type(element), "Unsupported Float8 type for NCCL reduction");
  TORCH_CHECK_WITH(TypeError, element != at::kBool || type != ReduceOp::AVG,
                   "Cannot use ReduceOp.AVG with boolean inputs");
  TORCH_CHECK_WITH(TypeError, type != ReduceOp::PREMUL_SUM || c10::isFloatingType(element),
                   "PreMulSum Data type must be half, float, bfloat16 or double");
  const bool adds = type == ReduceOp::SUM || type == ReduceOp::AVG || type == ReduceOp::PREMUL_SUM;
  TORCH_CHECK(adds || !tensor.is_complex(), "complex tensors are reduced by SUM, AVG and PREMUL_SUM only");
  if (const char* name = bitwise_name(type))
    TORCH_CHECK_WITH(ValueError, driver_is_cpu() && !c10::isFloatingType(element), "Cannot use ReduceOp.",
                     name, " with NCCL");
}

at::Tensor as_it_travels(const at::Tensor& tensor) {
  if (tensor.is_complex()) return at::view_as_real(tensor);
  if (c10::isFloat8Type(tensor.scalar_type())) return tensor.view(at::kByte);
  return tensor;
}

}  // namespace understudy::client
