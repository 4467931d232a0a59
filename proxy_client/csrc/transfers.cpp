#include "proxy_client/csrc/transfers.h"

#include <ATen/ATen.h>
#include <ATen/Operators.h>

#include "proxy_client/csrc/call/below_autograd.h"
#include "proxy_client/csrc/call/direct_call.h"
#include "proxy_client/csrc/device/client_tensor.h"
#include "proxy_client/csrc/minibatch_contents.h"
#include "proxy_client/csrc/session.h"
#include "proxy_client/csrc/statistics.h"

namespace understudy::client {
namespace {

using at::Tensor;

constexpr size_t kChunkBytes = LogWriter::kMaxBodyBytes - 2 * sizeof(uint64_t);  // behind [offset, bytes]

// One dense block of bytes: no gaps, whatever the order of dimensions.
bool is_plain(const Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

Tensor host_tensor_like(const Tensor& device) {
  return at::empty_strided(device.sizes(), device.strides(), at::TensorOptions().dtype(device.scalar_type()));
}

void upload(LogWriter& log, const ByteRange& to, const uint8_t* from) {
  count(&Statistics::host_to_device);
  for (size_t done = 0; done < to.bytes;) {
    const size_t chunk = std::min(kChunkBytes, to.bytes - done);
    append(log, Kind::kHostToDevice, to.handle, 2 + (chunk + 7) / 8, [&](uint64_t* body) {
      body[0] = to.offset + done;
      body[1] = chunk;
      body[1 + (chunk + 7) / 8] = 0;  // the padding, so that equal runs write equal records
      std::memcpy(body + 2, from + done, chunk);
      add_to_minibatch(body + 2, chunk, done == 0);
    });
    done += chunk;
  }
}

void download(LogWriter& log, const ByteRange& from, uint8_t* to) {
  count(&Statistics::device_to_host);
  const size_t most = log.page().fixed().reply_bytes / 2;
  for (size_t done = 0; done < from.bytes;) {
    const size_t chunk = std::min(most, from.bytes - done);
    call(
        log, Kind::kDeviceToHost, from.handle, 2,
        [&](uint64_t* body) {
          body[0] = from.offset + done;
          body[1] = chunk;
        },
        [&](const uint8_t* payload, size_t bytes) {
          TORCH_CHECK(bytes == chunk, "the device server sent ", bytes, " bytes instead of ", chunk);
          std::memcpy(to + done, payload, bytes);
        });
    done += chunk;
  }
  commit_if_due();
}

LogWriter& checked_log(const Tensor& device_tensor) {
  LogWriter& log = log_for(device_tensor.device().index());
  raise_if_failed(log);
  return log;
}

void device_to_device(Tensor& self, const Tensor& source, bool non_blocking) {
  Direct<at::_ops::copy_>::call(self, source, non_blocking);
}

// Converts on the host, as CPU PyTorch would, then sends the bytes the device tensor consists of.
void host_to_device(Tensor& self, const Tensor& source) {
  if (self.numel() == 0) {
    (void)source.expand(self.sizes());  // raises if the shapes do not fit
    return;
  }
  if (is_plain(self) && self.sizes() == source.sizes()) {
    LogWriter& log = checked_log(self);
    Tensor dense = source.resolve_conj().resolve_neg();
    if (dense.scalar_type() != self.scalar_type() || dense.strides() != self.strides())
      dense = host_tensor_like(self).copy_(dense);
    upload(log, byte_range(self), static_cast<const uint8_t*>(dense.const_data_ptr()));
    return;
  }
  // Another layout, or broadcasting: a dense copy goes up, the device spreads it.
  Tensor staged = at::empty(
      source.sizes(), source.options().device(self.device()).dtype(self.scalar_type()).pinned_memory(false));
  host_to_device(staged, source);
  device_to_device(self, staged, false);
}

void device_to_host(Tensor& self, const Tensor& source) {
  if (self.numel() == 0) {
    (void)source.expand(self.sizes());
    return;
  }
  if (source.numel() == 0)
    TORCH_CHECK(false, "cannot copy an empty tensor to a tensor of size ", self.sizes());
  Tensor plain = source;
  if (!is_plain(plain)) plain = plain.resolve_conj().resolve_neg().contiguous();
  LogWriter& log = checked_log(plain);
  const bool direct = self.scalar_type() == plain.scalar_type() && self.sizes() == plain.sizes() &&
                      self.strides() == plain.strides() && is_plain(self);
  Tensor host = direct ? self : host_tensor_like(plain);
  download(log, byte_range(plain), static_cast<uint8_t*>(host.mutable_data_ptr()));
  if (!direct) self.copy_(host);
}

}  // namespace

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const BelowAutograd guard;
  if (source._is_zerotensor()) return self.zero_();
  if (self.is_cuda() && source.is_cuda()) {
    device_to_device(self, source, non_blocking);
  } else if (self.is_cuda()) {
    TORCH_CHECK(source.is_cpu(), "cannot copy a tensor on ", source.device(), " to ", self.device());
    host_to_device(self, source);
  } else {
    TORCH_CHECK(self.is_cpu(), "cannot copy a tensor on ", source.device(), " to ", self.device());
    device_to_host(self, source);
  }
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& destination, bool non_blocking) {
  Tensor target = destination;
  copy_(target, source, non_blocking);
  return destination;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  const BelowAutograd guard;
  if (self.numel() == 1 && is_plain(self)) {
    const auto read = [&]<class T>(T value) -> at::Scalar {
      download(checked_log(self), byte_range(self), reinterpret_cast<uint8_t*>(&value));
      return value;
    };
    switch (self.scalar_type()) {  // the common ones without a tensor in between
      case at::kFloat:
        return read(float{});
      case at::kDouble:
        return read(double{});
      case at::kLong:
        return read(int64_t{});
      case at::kInt:
        return read(int32_t{});
      case at::kBool:
        return read(false);
      default:
        break;
    }
  }
  Tensor host = at::empty(self.sizes(), at::TensorOptions().dtype(self.scalar_type()));
  device_to_host(host, self);
  return host.item();
}

}  // namespace understudy::client
