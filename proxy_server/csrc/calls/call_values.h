// The values of a call, read from its record in the order of its template, without running it.
#pragma once
#include <cstdint>

#include "proxy_server/csrc/calls/call_template.h"

namespace understudy::server {

// `see` has: tensor(handle, written), host(bytes, count, wrapped_number), numbers(words, count),
// generator(id), composite() for what is made of several dense tensors, behind which nothing is read any
// more.
template <class Visitor>
bool visit_value(const ArgumentSpec& a, Words& words, Visitor& see) {
  using replay::Tag;
  switch (a.tag) {
    case Tag::kTensor:
      see.tensor(words.next(), a.written);
      return true;
    case Tag::kCpuTensor: {
      uint64_t bytes = a.tensor->type.itemsize();
      for (const int64_t size : a.tensor->sizes) bytes *= static_cast<uint64_t>(size);
      see.host(words.take_bytes(bytes), bytes, (a.tensor->flags & replay::kWrappedNumber) != 0);
      return true;
    }
    case Tag::kSparse:
    case Tag::kSparseCompressed:
    case Tag::kNested:
      see.composite();
      return false;
    case Tag::kTensorList:
    case Tag::kOptionalTensorList:
    case Tag::kList:
      for (const ArgumentSpec& item : a.items)
        if (!visit_value(item, words, see)) return false;
      return true;
    case Tag::kDouble:
      see.numbers(words.take(1), 1);
      return true;
    case Tag::kComplex:
      see.numbers(words.take(2), 2);
      return true;
    case Tag::kDoubleList:
      see.numbers(words.take(a.count), a.count);
      return true;
    case Tag::kGenerator:
      see.generator(words.next());
      return true;
    default:
      return true;
  }
}

template <class Visitor>
void visit_values(const Template& t, Words& words, Visitor& see) {
  for (const ArgumentSpec& a : t.arguments)
    if (!visit_value(a, words, see)) return;
}

}  // namespace understudy::server
