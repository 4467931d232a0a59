#include "replay/csrc/tools/buffer_uses.h"

#include <algorithm>

#include "replay/csrc/log/templates.h"

namespace understudy::replay {
namespace {

using See = std::function<void(const BufferUse&)>;
using How = BufferUse::How;

constexpr int kMaxNesting = 4;

const ElementType& element_type(uint64_t code) {
  if (code >= kElementTypeCount) throw LogError("unknown element type " + std::to_string(code));
  return kElementTypes[code];
}

// Element type and sizes; the words that follow them, strides, say nothing here.
BufferUse shaped(uint64_t word, Words& words) {
  BufferUse use;
  use.type = &element_type(word >> 8 & 255);
  use.dimensions = word >> 16 & 255;
  const uint64_t* sizes = words.take(use.dimensions);
  std::copy_n(sizes, std::min(use.dimensions, BufferUse::kMostSizes), use.sizes.begin());
  return use;
}

BufferUse strided(uint64_t word, Words& words) {
  (void)words.next();  // offset
  const BufferUse use = shaped(word, words);
  (void)words.take(use.dimensions);
  return use;
}

// A call's arguments: what does not change from call to call is in the template, the rest in the record.
class Call {
 public:
  Call(Words key, Words values, const See& see) : key_(key), values_(values), see_(see) {}

  void arguments() {
    while (key_.left() != 0) argument(0);
  }

  void results(Words outputs) {
    while (outputs.left() != 0) {
      const uint64_t word = outputs.next();
      if ((word & 255) == 0) continue;  // a written argument
      if ((word & 255) == 3) {          // a number
        (void)outputs.next();
        continue;
      }
      for (uint64_t left = outputs.count(word >> 8); left > 0; left--) {
        const uint64_t item = outputs.next();
        if ((item & 255) != 0) continue;  // none
        (void)outputs.take(2);            // offset, bytes of its storage
        BufferUse use = shaped(item, outputs);
        (void)outputs.take(use.dimensions);
        show(use, values_.next(), How::kMade);
      }
    }
  }

  void results_of_sync() { show({}, values_.next(), How::kResultsFrom); }

  // A dense tensor that is written out in the record.
  void raw() {
    const uint64_t word = values_.next();
    if (static_cast<Tag>(word & 255) != Tag::kTensor)
      throw LogError("a record holds no tensor where it should");
    const uint64_t handle = values_.next();
    show(strided(word, values_), handle);
  }

 private:
  void show(BufferUse use, uint64_t handle, How how = How::kNamed) {
    use.handle = handle;
    use.how = how;
    see_(use);
  }

  void argument(int depth) {
    if (depth > kMaxNesting) throw LogError("arguments are nested too deeply");
    const uint64_t word = key_.next();
    const uint64_t n = word >> 8;
    switch (static_cast<Tag>(word & 255)) {
      case Tag::kTensor: {
        const BufferUse use = strided(word, key_);
        return show(use, values_.next());
      }
      case Tag::kCpuTensor:
        return host_tensor(word);
      case Tag::kTensorList:
      case Tag::kOptionalTensorList:
      case Tag::kList:
        for (uint64_t left = key_.count(n); left > 0; left--) argument(depth + 1);
        return;
      case Tag::kInt:
      case Tag::kConstantDouble:
        (void)key_.next();
        return;
      case Tag::kString:
        (void)key_.take_bytes(n);
        return;
      case Tag::kIntList:
      case Tag::kBoolList:
        (void)key_.take(n);
        return;
      case Tag::kDouble:
      case Tag::kGenerator:
        (void)values_.next();
        return;
      case Tag::kComplex:
        (void)values_.take(2);
        return;
      case Tag::kDoubleList:
        (void)values_.take(n);
        return;
      case Tag::kSparse:
      case Tag::kSparseCompressed:
      case Tag::kNested:
        return composite(word);
      case Tag::kNone:
      case Tag::kUndefined:
      case Tag::kBool:
      case Tag::kDevice:
      case Tag::kCpuDevice:
        return;
    }
    throw LogError("unknown argument tag " + std::to_string(word & 255));
  }

  void host_tensor(uint64_t word) {
    uint64_t bytes = element_type(word >> 8 & 255).bytes;
    const uint64_t dimensions = word >> 16 & 255;
    const uint64_t* sizes = key_.take(dimensions);
    for (uint64_t i = 0; i < dimensions; i++)
      if (__builtin_mul_overflow(bytes, copy_once(sizes[i]), &bytes))
        throw LogError("the size of a tensor overflows");
    (void)values_.take_bytes(bytes);
  }

  // Tensors that are made of several dense ones.
  void composite(uint64_t word) {
    const Tag tag = static_cast<Tag>(word & 255);
    const uint64_t dimensions = word >> 16 & 255;
    if (tag == Tag::kNested) {
      const uint64_t components = values_.next();
      raw();
      (void)values_.take(values_.count(components, 2 * dimensions + 1) * (2 * dimensions + 1));
      return;
    }
    (void)key_.take(dimensions);                    // its own sizes
    if (tag == Tag::kSparse) (void)values_.next();  // whether it is coalesced
    for (int left = tag == Tag::kSparse ? 2 : 3; left > 0; left--) raw();
  }

  Words key_, values_;
  const See& see_;
};

void buffers_of_operator(const LogMap& log, bool sync, uint64_t id, Words body, const See& see) {
  const TemplateParts parts = read_template(log, id);
  Call call(Words(parts.key, parts.key_words), body, see);
  call.arguments();
  if (sync)
    call.results_of_sync();
  else
    call.results(Words(parts.outputs, parts.output_words));
}

void buffers_of_collective(Words body, const See& see) {
  const CollectiveHeader header =
      copy_once(*reinterpret_cast<const CollectiveHeader*>(body.take(sizeof(CollectiveHeader) / 8)));
  Call call({nullptr, 0}, body, see);
  for (const uint64_t tensors : {header.inputs, header.outputs})
    for (uint64_t left = body.count(tensors, 3); left > 0; left--) call.raw();
}

}  // namespace

void for_each_buffer(const LogMap& log, Kind kind, uint64_t aux, Words body, const See& see) {
  if (is_sync(kind)) (void)body.take(2);  // sequence and digest
  BufferUse use;
  use.handle = aux;
  switch (kind) {
    case Kind::kOperator:
    case Kind::kOperatorSync:
      return buffers_of_operator(log, kind == Kind::kOperatorSync, aux, body, see);
    case Kind::kCollective:
      return buffers_of_collective(body, see);
    case Kind::kAllocate:
    case Kind::kResize:
      if (kind == Kind::kAllocate) use.how = How::kMade;
      use.bytes = body.next();
      return see(use);
    case Kind::kHostToDevice:
    case Kind::kDeviceToHost:
      (void)body.next();  // where in it
      use.bytes = body.next();
      return see(use);
    default:
      return;
  }
}

}  // namespace understudy::replay
