#include "proxy_server/csrc/calls/sparse_checks.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace understudy::server {
namespace {

using at::Tensor;
using replay::LogError;

void require(bool fits, const char* what) {
  if (!fits) throw LogError(std::string("a sparse tensor's ") + what);
}

constexpr int64_t kMostElements = 1ll << 40;  // of one component; strides may be 0

// To be read here: on the host, without gaps.
Tensor on_host(const Tensor& tensor) { return tensor.cpu().contiguous(); }

// Sizes of `values` behind its element dimension (and blocks) are the tensor's dense sizes.
bool ends_with(c10::IntArrayRef sizes, size_t from, c10::IntArrayRef tail) {
  return sizes.size() == from + tail.size() && std::equal(tail.begin(), tail.end(), sizes.begin() + from);
}

void check_in_range(const int64_t* indices, int64_t count, int64_t size) {
  uint64_t largest = 0;  // a negative index is a very large one
  for (int64_t i = 0; i < count; i++) largest = std::max(largest, static_cast<uint64_t>(indices[i]));
  TORCH_CHECK_INDEX(count == 0 || largest < static_cast<uint64_t>(size), "a sparse tensor has an index ",
                    static_cast<int64_t>(largest), " in a dimension of size ", size);
}

// Element i - 1 comes before element i, in lexicographic order of their indices.
bool comes_before(const int64_t* indices, int64_t dims, int64_t count, int64_t i) {
  for (int64_t d = 0; d < dims; d++) {
    const int64_t before = indices[d * count + i - 1], here = indices[d * count + i];
    if (before != here) return before < here;
  }
  return false;
}

template <class Index>
void check_compressed_content(const Tensor& compressed, const Tensor& plain, int64_t plain_size) {
  const Tensor offsets = on_host(compressed), indices = on_host(plain);
  const int64_t row = offsets.size(-1), nnz = indices.size(-1);
  const Index* offset = offsets.const_data_ptr<Index>();
  for (int64_t batch = 0; batch < offsets.numel() / row; batch++, offset += row) {
    bool rising = offset[0] == 0 && offset[row - 1] == nnz;
    for (int64_t i = 1; i < row; i++) rising = rising && offset[i - 1] <= offset[i];
    TORCH_CHECK(rising, "a sparse tensor's compressed indices do not rise from 0 to ", nnz,
                ", the number of its elements");
  }
  const Index* index = indices.const_data_ptr<Index>();
  for (int64_t i = 0; i < indices.numel(); i++)
    TORCH_CHECK_INDEX(index[i] >= 0 && index[i] < plain_size, "a sparse tensor has an index ", index[i],
                      " in a dimension of ", plain_size, " rows, columns or blocks");
}

}  // namespace

void check_coo(const CompositeSpec& spec, const Tensor& indices, const Tensor& values, bool coalesced) {
  const c10::IntArrayRef sizes(spec.sizes);
  const int64_t sparse_dim = spec.sparse_dim;
  require(indices.scalar_type() == at::kLong && indices.dim() == 2 && indices.size(0) == sparse_dim,
          "indices are not a matrix of int64 with one row per sparse dimension");
  const int64_t nnz = indices.size(1);
  require(values.scalar_type() == spec.dtype && values.dim() >= 1 && values.size(0) == nnz &&
              ends_with(values.sizes(), 1, sizes.slice(static_cast<size_t>(sparse_dim))),
          "values do not fit its indices, sizes or element type");
  if (nnz == 0) return;
  const Tensor host = on_host(indices);
  const int64_t* index = host.const_data_ptr<int64_t>();
  for (int64_t d = 0; d < sparse_dim; d++)
    check_in_range(index + d * nnz, nnz, sizes[static_cast<size_t>(d)]);
  if (!coalesced) return;
  for (int64_t i = 1; i < nnz; i++)
    TORCH_CHECK(comes_before(index, sparse_dim, nnz, i),
                "a sparse tensor is marked as coalesced, but its indices are not in order, or not unique");
}

void check_compressed(const CompositeSpec& spec, const Tensor& compressed, const Tensor& plain,
                      const Tensor& values) {
  const c10::IntArrayRef sizes(spec.sizes);
  const c10::Layout layout = spec.layout;
  const bool blocked = layout == at::kSparseBsr || layout == at::kSparseBsc;
  const bool by_row = layout == at::kSparseCsr || layout == at::kSparseBsr;
  const auto dtype = compressed.scalar_type();
  require((dtype == at::kLong || dtype == at::kInt) && plain.scalar_type() == dtype &&
              compressed.dim() >= 1 && plain.dim() == compressed.dim(),
          "compressed and plain indices are not int32 or int64 of one kind");
  const auto batch = static_cast<size_t>(compressed.dim() - 1), blocks = static_cast<size_t>(blocked ? 2 : 0);
  require(sizes.size() >= batch + 2 && compressed.size(-1) >= 1, "indices have too many dimensions");
  const auto batch_sizes = sizes.slice(0, batch);
  const int64_t nnz = plain.size(-1);
  require(compressed.sizes().slice(0, batch) == batch_sizes && plain.sizes().slice(0, batch) == batch_sizes,
          "indices do not fit its batch dimensions");
  require(values.scalar_type() == spec.dtype && static_cast<size_t>(values.dim()) >= batch + 1 + blocks &&
              values.sizes().slice(0, batch) == batch_sizes &&
              values.size(static_cast<int64_t>(batch)) == nnz &&
              ends_with(values.sizes(), batch + 1 + blocks, sizes.slice(batch + 2)),
          "values do not fit its indices, sizes or element type");
  int64_t rows = sizes[batch], columns = sizes[batch + 1];
  if (blocked) {
    const int64_t high = values.size(static_cast<int64_t>(batch) + 1);
    const int64_t wide = values.size(static_cast<int64_t>(batch) + 2);
    require(high > 0 && wide > 0 && rows % high == 0 && columns % wide == 0, "blocks do not fit its sizes");
    rows /= high;
    columns /= wide;
  }
  require(compressed.size(-1) - 1 == (by_row ? rows : columns), "compressed indices do not fit its sizes");
  if (dtype == at::kLong)
    check_compressed_content<int64_t>(compressed, plain, by_row ? columns : rows);
  else
    check_compressed_content<int32_t>(compressed, plain, by_row ? columns : rows);
}

void check_nested(const CompositeSpec& spec, const Tensor& sizes, const Tensor& strides,
                  const Tensor& offsets, const Tensor& buffer) {
  const auto bytes = static_cast<uint64_t>(buffer.storage().nbytes());
  if (buffer.scalar_type() != spec.dtype || buffer.dim() != 1 || buffer.storage_offset() != 0 ||
      (buffer.numel() > 1 && buffer.stride(0) != 1) || buffer.nbytes() > bytes)
    throw LogError("the buffer of a nested tensor is not a vector of its element type");
  const auto dims = static_cast<size_t>(sizes.size(1));
  const auto row = [&](const Tensor& of, int64_t i) {
    const int64_t* first = of.const_data_ptr<int64_t>() + i * static_cast<int64_t>(dims);
    return std::vector<int64_t>(first, first + dims);
  };
  for (int64_t i = 0; i < sizes.size(0); i++) {
    TensorSpec component;
    component.type = c10::scalarTypeToTypeMeta(spec.dtype);
    component.offset = offsets.const_data_ptr<int64_t>()[i];
    component.sizes = row(sizes, i);
    component.strides = row(strides, i);
    int64_t elements = 1;
    if (extent_of(component) > bytes) throw LogError("a nested tensor reaches behind its buffer");
    for (const int64_t size : component.sizes)
      if (__builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements) || elements > kMostElements)
        throw LogError("the size of a nested tensor overflows");
  }
}

}  // namespace understudy::server
