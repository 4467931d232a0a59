// All-reduce of sparse tensors, out of collectives on dense ones: each rank's indices and values, padded to
// the longest, are gathered everywhere and added up in the order of ranks. Gloo adds in this order, too.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "proxy_client/csrc/distributed/collective_work.h"
#include "proxy_client/csrc/distributed/process_group.h"

namespace understudy::client {

using at::Tensor;
using WorkPtr = ProcessGroup::WorkPtr;

namespace {

// `piece`, filled up with zeros to `length` in dimension `dim`.
Tensor padded(const Tensor& piece, int64_t dim, int64_t length) {
  c10::DimVector sizes(piece.sizes());
  sizes[static_cast<size_t>(dim)] = length;
  Tensor whole = at::zeros(sizes, piece.options());
  whole.narrow(dim, 0, piece.size(dim)).copy_(piece);
  return whole;
}

// One row of everybody's `mine`, by rank.
Tensor gathered(ProcessGroup& group, const Tensor& mine) {
  Tensor row = mine.flatten();
  Tensor all = at::empty({group.getSize() * row.numel()}, row.options());
  group._allgather_base(all, row, {})->wait();
  c10::DimVector sizes(mine.sizes());
  sizes.insert(sizes.begin(), group.getSize());
  return all.view(sizes);
}

}  // namespace

WorkPtr ProcessGroup::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  TORCH_CHECK_WITH(ValueError, tensors.size() == 1 && tensors[0].is_cuda() && tensors[0].is_sparse(),
                   "a sparse all-reduce takes one sparse COO tensor on cuda");
  TORCH_CHECK_WITH(
      ValueError, options.reduceOp == c10d::ReduceOp::SUM,
      "unsupported reduction operation: allreduce of sparse tensors only works with ReduceOp.SUM");
  const at::AutoDispatchBelowAutograd guard;
  const Tensor input = tensors[0].coalesce();
  const Tensor count =
      at::full({1}, input._nnz(), at::TensorOptions().dtype(at::kLong).device(input.device()));
  const Tensor counts = gathered(*this, count).cpu().flatten();
  const int64_t longest = counts.max().item<int64_t>();
  const Tensor indices = gathered(*this, padded(input._indices(), 1, longest));
  const Tensor values = gathered(*this, padded(input._values(), 0, longest));
  Tensor sum;
  for (int64_t rank = 0; rank < getSize(); rank++) {
    const int64_t nnz = counts[rank].item<int64_t>();
    const Tensor part = at::_sparse_coo_tensor_unsafe(indices[rank].narrow(1, 0, nnz),
                                                      values[rank].narrow(0, 0, nnz), input.sizes());
    sum = sum.defined() ? sum.add_(part) : part;
  }
  tensors[0].copy_(sum.coalesce());
  return c10::make_intrusive<CollectiveWork>(
      getRank(),
      CollectiveWork::Details{c10d::OpType::ALLREDUCE, tensors[0].device().index(), 0, -1, {}, false},
      tensors);
}

}  // namespace understudy::client
