#include "proxy_server/csrc/nccl/elements.h"

#include "replay/csrc/log/log_map.h"

namespace understudy::server::nccl {

using replay::LogError;

DataType type_of(const at::Tensor& tensor) {
  switch (c10::toRealValueType(tensor.scalar_type())) {
    case at::kChar:
      return DataType::kInt8;
    case at::kByte:
    case at::kBool:
    case at::kFloat8_e5m2:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2fnuz:
      return DataType::kUint8;
    case at::kInt:
      return DataType::kInt32;
    case at::kLong:
      return DataType::kInt64;
    case at::kHalf:
      return DataType::kFloat16;
    case at::kFloat:
      return DataType::kFloat32;
    case at::kDouble:
      return DataType::kFloat64;
    case at::kBFloat16:
      return DataType::kBfloat16;
    default:
      throw LogError(std::string("Input tensor data type is not supported for NCCL process group: ") +
                     c10::toString(tensor.scalar_type()));
  }
}

size_t count_of(const at::Tensor& tensor) {
  return static_cast<size_t>(tensor.numel()) * (tensor.is_complex() ? 2 : 1);
}

Reduction reduction_of(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  const bool boolean = tensor.scalar_type() == at::kBool;
  if (c10::isFloat8Type(tensor.scalar_type())) throw LogError("Unsupported Float8 type for NCCL reduction");
  const auto type = static_cast<c10d::ReduceOp::RedOpType>(op);
  if (tensor.is_complex() && type != c10d::ReduceOp::SUM && type != c10d::ReduceOp::AVG)
    throw LogError("complex tensors are reduced by SUM and AVG only");
  switch (type) {
    case c10d::ReduceOp::SUM:
      return boolean ? Reduction::kMax : Reduction::kSum;  // as bytes they would overflow
    case c10d::ReduceOp::AVG:
      if (boolean) throw LogError("Cannot use ReduceOp.AVG with boolean inputs");
      return Reduction::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return Reduction::kProduct;
    case c10d::ReduceOp::MIN:
      return Reduction::kMin;
    case c10d::ReduceOp::MAX:
      return Reduction::kMax;
    case c10d::ReduceOp::BAND:
      throw LogError("Cannot use ReduceOp.BAND with NCCL");
    case c10d::ReduceOp::BOR:
      throw LogError("Cannot use ReduceOp.BOR with NCCL");
    case c10d::ReduceOp::BXOR:
      throw LogError("Cannot use ReduceOp.BXOR with NCCL");
    default:
      throw LogError("Unhandled ReduceOp");
  }
}

void send_to(const Library& nccl, const at::Tensor& from, int peer, Handle handle, DeviceStream stream) {
  check(nccl, nccl.send(from.const_data_ptr(), count_of(from), type_of(from), peer, handle, stream));
}

void receive_from(const Library& nccl, const at::Tensor& into, int peer, Handle handle, DeviceStream stream) {
  check(nccl, nccl.receive(into.mutable_data_ptr(), count_of(into), type_of(into), peer, handle, stream));
}

}  // namespace understudy::server::nccl
