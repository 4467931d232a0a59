#include "proxy_server/csrc/calls/call_template.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <tuple>

#include "proxy_server/csrc/calls/composite.h"
#include "proxy_server/csrc/calls/words.h"
#include "proxy_server/csrc/operators/operator_library.h"
#include "replay/csrc/digest/digest.h"
#include "replay/csrc/log/templates.h"

namespace understudy::server {
namespace {

using replay::LogError;
using replay::Tag;

constexpr uint64_t kMaxDimensions = 255;  // what a word can say; kernels have limits of their own
constexpr int kMaxNesting = 4;

// Operators that change arguments which their schema does not mark as written (batch norm statistics).
// tests/device_server/test_executor.py shows for each row that the kernel really does.
struct UndeclaredWrite {
  const char* name;
  std::array<int, 2> arguments;
};
constexpr UndeclaredWrite kUndeclaredWrites[] = {
    {"aten::native_batch_norm", {3, 4}},
    {"aten::batch_norm_update_stats", {1, 2}},
    {"aten::cudnn_batch_norm", {3, 4}},
    {"aten::miopen_batch_norm", {3, 4}},
    {"aten::batch_norm_gather_stats", {3, 4}},
    {"aten::batch_norm_gather_stats_with_counts", {3, 4}},
    {"aten::mkldnn_rnn_layer_backward", {22, 22}},
};

// Kernels that do not write all bytes of the memory which they allocate for results: the loss of a mean lies
// in as many as its input has; a table is filled as far as the sequences reach. A test looks for more of
// them.
constexpr const char* kLeaveUnwritten[] = {
    "aten::mse_loss",         "aten::smooth_l1_loss",     "aten::_ctc_loss",
    "aten::mkldnn_rnn_layer", "aten::unique_consecutive", "aten::_embedding_bag",
};

// Operators that reach outside device memory: files, host pointers, shared memory.
const std::set<std::string>& refused() {
  static const std::set<std::string> names{"aten::from_file", "aten::_pin_memory", "aten::pin_memory",
                                           "aten::set_",      "aten::set_data",    "aten::_print",
                                           "aten::save"};
  return names;
}

bool is_tensor_word(Tag tag) { return tag == Tag::kTensor || tag == Tag::kCpuTensor || is_composite(tag); }

// Bytes of storage that sizes, strides and offset reach. Throws on negative values and on overflow.
uint64_t extent(const TensorSpec& s) {
  uint64_t last = 0;
  bool empty = false;
  for (size_t i = 0; i < s.sizes.size(); i++) {
    if (s.sizes[i] < 0 || s.strides[i] < 0) throw LogError("a tensor has a negative size or stride");
    if (s.sizes[i] == 0) {
      empty = true;
      continue;
    }
    uint64_t reach;
    if (__builtin_mul_overflow(static_cast<uint64_t>(s.sizes[i] - 1), static_cast<uint64_t>(s.strides[i]),
                               &reach) ||
        __builtin_add_overflow(last, reach, &last))
      throw LogError("the extent of a tensor overflows");
  }
  uint64_t elements;
  if (s.offset < 0) throw LogError("a tensor has a negative offset");
  if (__builtin_add_overflow(last, static_cast<uint64_t>(s.offset), &elements) ||
      __builtin_add_overflow(elements, uint64_t{empty ? 0u : 1u}, &elements) ||
      __builtin_mul_overflow(elements, static_cast<uint64_t>(s.type.itemsize()), &elements) ||
      elements > (1ull << 60))
    throw LogError("the extent of a tensor overflows");
  return empty ? 0 : elements;
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    if (sizes[i] < 0 || __builtin_mul_overflow(step, std::max<int64_t>(sizes[i], 1), &step))
      throw LogError("the size of a tensor overflows");
  }
  return strides;
}

std::vector<int64_t> take_longs(Words& words, uint64_t n) {
  const uint64_t* p = words.take(n);
  std::vector<int64_t> values(n);
  for (uint64_t i = 0; i < n; i++) values[i] = static_cast<int64_t>(p[i]);
  return values;
}

}  // namespace

uint64_t extent_of(const TensorSpec& spec) { return extent(spec); }

c10::ScalarType scalar_type(uint64_t code) {
  if (code >= static_cast<uint64_t>(c10::ScalarType::NumOptions) ||
      code == static_cast<uint64_t>(c10::ScalarType::Undefined))
    throw LogError("unknown element type " + std::to_string(code));
  return static_cast<c10::ScalarType>(code);
}

std::vector<int64_t> take_sizes(Words& words, uint64_t dimensions) {
  if (dimensions > kMaxDimensions) throw LogError("a tensor has too many dimensions");
  std::vector<int64_t> sizes = take_longs(words, dimensions);
  (void)contiguous_strides(sizes);  // throws if a size is negative, or all together are too large
  return sizes;
}

namespace {

ArgumentSpec parse_argument(Words& words, const Driver& driver, SpecTable& specs, int depth) {
  if (depth > kMaxNesting) throw LogError("arguments are nested too deeply");
  ArgumentSpec a;
  const uint64_t word = words.next();
  a.tag = static_cast<Tag>(word & 255);
  const uint64_t n = word >> 8;
  switch (a.tag) {
    case Tag::kTensor:
    case Tag::kCpuTensor: {
      TensorSpec t;
      t.dtype = scalar_type(word >> 8 & 255);
      t.type = c10::scalarTypeToTypeMeta(t.dtype);
      t.flags = static_cast<uint8_t>(word >> 24 & 255);
      const uint64_t dim = word >> 16 & 255;
      if (dim > kMaxDimensions) throw LogError("a tensor has too many dimensions");
      if (a.tag == Tag::kTensor) t.offset = static_cast<int64_t>(words.next());
      t.sizes = take_longs(words, dim);
      if (a.tag == Tag::kTensor)
        t.strides = take_longs(words, dim);
      else
        t.strides = contiguous_strides(t.sizes);
      t.extent_bytes = extent(t);
      a.tensor = specs.intern(std::move(t));
      break;
    }
    case Tag::kSparse:
    case Tag::kSparseCompressed:
    case Tag::kNested:
      return parse_composite(word, words);
    case Tag::kTensorList:
    case Tag::kOptionalTensorList:
    case Tag::kList:
      a.count = words.count(n);
      for (uint64_t i = 0; i < n; i++) {
        a.items.push_back(parse_argument(words, driver, specs, depth + 1));
        const Tag item = a.items.back().tag;
        const bool fits = a.tag == Tag::kList
                              ? (item == Tag::kInt || item == Tag::kDouble || item == Tag::kBool ||
                                 item == Tag::kComplex || item == Tag::kConstantDouble)
                              : (is_tensor_word(item) || item == Tag::kUndefined);
        if (!fits) throw LogError("a list holds an item of the wrong kind");
      }
      break;
    case Tag::kInt:
      a.constant = static_cast<int64_t>(words.next());
      break;
    case Tag::kBool:
      a.constant = n != 0;
      break;
    case Tag::kConstantDouble:
      a.constant = words.next_double();
      break;
    case Tag::kString: {
      const uint8_t* bytes = words.take_bytes(n);
      a.constant = std::string(reinterpret_cast<const char*>(bytes), n);
      break;
    }
    case Tag::kDevice:
      a.constant = driver.device();
      break;
    case Tag::kCpuDevice:
      a.constant = c10::Device(c10::kCPU);
      break;
    case Tag::kIntList:
      a.constant = c10::List<int64_t>(c10::ArrayRef<int64_t>(take_longs(words, words.count(n))));
      break;
    case Tag::kBoolList: {
      c10::List<bool> list;
      for (const int64_t v : take_longs(words, words.count(n))) list.push_back(v != 0);
      a.constant = list;
      break;
    }
    case Tag::kDoubleList:
      if (n > (1u << 20)) throw LogError("a list is too long");
      a.count = n;
      break;
    case Tag::kNone:
    case Tag::kUndefined:
    case Tag::kDouble:
    case Tag::kGenerator:
    case Tag::kComplex:
      break;
    default:
      throw LogError("unknown argument tag " + std::to_string(word & 255));
  }
  return a;
}

uint64_t lazy_flags(uint64_t word) {
  if ((word & ~(replay::kConjugate | replay::kNegative)) != 0) throw LogError("unknown flags of a result");
  return word;
}

ReturnSpec parse_return(Words& words, SpecTable& specs) {
  ReturnSpec r;
  const uint64_t word = words.next();
  r.kind = word & 255;
  if (r.kind > 3) throw LogError("unknown kind of result");
  if (r.kind == 0) {
    r.flags = word >> 8 & replay::kOtherFlags;
    r.flags |= lazy_flags(word >> 8 & ~replay::kOtherFlags);
    return r;
  }
  if (r.kind == 3) {
    r.number = static_cast<int64_t>(words.next());
    return r;
  }
  const uint64_t n = words.count(word >> 8);
  if (r.kind == 1 && n != 1) throw LogError("a tensor result needs one description");
  for (uint64_t i = 0; i < n; i++) {
    OutputSpec o;
    const uint64_t w = words.next();
    o.fresh = (w & 255) == 0;
    if (o.fresh) {
      TensorSpec t;
      t.dtype = scalar_type(w >> 8 & 255);
      t.type = c10::scalarTypeToTypeMeta(t.dtype);
      t.flags = static_cast<decltype(t.flags)>(lazy_flags(w >> 24));
      if ((t.flags & replay::kConjugate) != 0 && !c10::isComplexType(t.dtype))
        throw LogError("a result that is not complex is conjugated");
      const uint64_t dim = w >> 16 & 255;
      if (dim > kMaxDimensions) throw LogError("a tensor has too many dimensions");
      t.offset = static_cast<int64_t>(words.next());
      o.storage_bytes = words.next();
      t.sizes = take_longs(words, dim);
      t.strides = take_longs(words, dim);
      t.extent_bytes = extent(t);
      if (t.extent_bytes > o.storage_bytes || o.storage_bytes > (1ull << 60))
        throw LogError("a result does not fit its storage");
      o.tensor = specs.intern(std::move(t));
    }
    r.items.push_back(std::move(o));
  }
  return r;
}

void mark_writes(Template& t) {
  const auto& arguments = t.op.schema().arguments();
  for (size_t i = 0; i < t.arguments.size(); i++) {
    const auto* alias = arguments[i].alias_info();
    bool written = alias != nullptr && alias->isWrite();
    for (const UndeclaredWrite& u : kUndeclaredWrites)
      if (t.op.schema().name() == u.name &&
          (u.arguments[0] == static_cast<int>(i) || u.arguments[1] == static_cast<int>(i)))
        written = true;
    t.arguments[i].written = written;
    for (ArgumentSpec& item : t.arguments[i].items) item.written = written;
    t.writes = t.writes || written;
  }
}

bool is_pytorchs(const std::string& name) { return name.rfind("aten::", 0) == 0; }

// PyTorch's own alone are called so: what another library names that way may compute.
bool only_allocates(const std::string& name) {
  return is_pytorchs(name) && name.find("empty") != std::string::npos;
}

// Of other libraries nothing is known.
bool leaves_unwritten(const std::string& name) {
  return !is_pytorchs(name) || only_allocates(name) ||
         std::any_of(std::begin(kLeaveUnwritten), std::end(kLeaveUnwritten),
                     [&](const char* known) { return name == known; });
}

// Fused attention of CUDA gives Philox seed and offset as results in host memory, where its backward reads
// them (PyTorch's Note [Seed and Offset Device]). A buffer that was restored lies on the device.
bool read_by_the_host(const Template& t, const std::string& argument) {
  return (t.name == "aten::_scaled_dot_product_efficient_attention_backward" ||
          t.name == "aten::_efficient_attention_backward") &&
         (argument == "philox_seed" || argument == "philox_offset");
}

// Plain strided tensors of the device, and at least one: then the dispatcher could find nothing else.
bool runs_on_driver(const Template& t) {
  bool any = false;
  const auto plain = [&](const ArgumentSpec& a) {
    if (is_composite(a.tag)) return false;
    if (a.tag == Tag::kTensor) any = true;
    return a.tag != Tag::kTensor || (a.tensor->flags & (replay::kConjugate | replay::kNegative)) == 0;
  };
  for (const ArgumentSpec& a : t.arguments) {
    if (!plain(a)) return false;
    for (const ArgumentSpec& item : a.items)
      if (!plain(item)) return false;
  }
  return any;
}

// oneDNN's recurrent layer chooses its algorithm by whether gradients are recorded. That is known to the
// worker alone, which says so in `train`, an argument that the kernel does not look at.
bool gives_gradients_of_attention(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != name.npos; };
  return has("_backward") && (has("flash_attention") || has("efficient_attention"));
}

bool recorded_no_gradients(const Template& t) {
  constexpr size_t kTrain = 15;
  return t.name == "aten::mkldnn_rnn_layer" && t.arguments[kTrain].tag == Tag::kBool &&
         !t.arguments[kTrain].constant.toBool();
}

}  // namespace

bool SpecTable::Less::operator()(const SharedSpec& a, const SharedSpec& b) const {
  return std::tie(a->dtype, a->flags, a->offset, a->sizes, a->strides) <
         std::tie(b->dtype, b->flags, b->offset, b->sizes, b->strides);
}

SharedSpec SpecTable::intern(TensorSpec spec) {
  spec.serial = ++last_serial_;
  return *specs_.insert(std::make_shared<const TensorSpec>(std::move(spec))).first;
}

void SpecTable::drop_unused() {
  std::erase_if(specs_, [](const SharedSpec& spec) { return spec.use_count() == 1; });
}

TensorSpec parse_tensor(uint64_t word, Words& words) {
  TensorSpec t;
  if (static_cast<Tag>(word & 255) != Tag::kTensor) throw LogError("a collective needs tensors");
  t.dtype = scalar_type(word >> 8 & 255);
  t.type = c10::scalarTypeToTypeMeta(t.dtype);
  const uint64_t dim = word >> 16 & 255;
  if (dim > kMaxDimensions) throw LogError("a tensor has too many dimensions");
  t.offset = static_cast<int64_t>(words.next());
  t.sizes = take_longs(words, dim);
  t.strides = take_longs(words, dim);
  t.extent_bytes = extent(t);
  return t;
}

at::Tensor view_of(const c10::Storage& storage, const TensorSpec& spec) {
  check_extent(storage, spec);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                    c10::DispatchKeySet(Driver::key_of(storage)), spec.type);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(spec.sizes, spec.strides, spec.offset);
  if (spec.flags & replay::kWrappedNumber) impl->set_wrapped_number(true);
  if (spec.flags & replay::kConjugate) t._set_conj(true);
  if (spec.flags & replay::kNegative) t._set_neg(true);
  return t;
}

std::unique_ptr<Template> parse_template(const replay::LogMap& log, uint64_t id, const Driver& driver,
                                         SpecTable& specs) {
  const replay::TemplateParts parts = replay::read_template(log, id);
  const OperatorName parsed = parse_operator_name(parts.name);
  const std::string name = parsed.full();
  const bool allowed = parsed.base.rfind("aten::", 0) == 0
                           ? parsed.libraries.empty() && refused().count(parsed.base) == 0
                           : !parsed.libraries.empty() && !is_built_in(parsed.base);
  TORCH_CHECK_NOT_IMPLEMENTED(allowed, "the device server does not run operator ", name);
  load_libraries(parsed.libraries);
  const auto op = c10::Dispatcher::singleton().findSchema({parsed.base, parsed.overload});
  TORCH_CHECK_NOT_IMPLEMENTED(op.has_value(), "the device server has no operator ", name);
  auto t = std::make_unique<Template>(Template{name, *op, {}, {}, false, false, false});
  Words key(parts.key, parts.key_words);
  while (key.left() != 0) t->arguments.push_back(parse_argument(key, driver, specs, 0));
  if (t->arguments.size() != op->schema().arguments().size())
    throw LogError("a call of " + name + " has " + std::to_string(t->arguments.size()) +
                   " arguments instead of " + std::to_string(op->schema().arguments().size()));
  for (size_t i = 0; i < t->arguments.size(); i++)
    t->arguments[i].on_host = read_by_the_host(*t, op->schema().arguments()[i].name());
  Words outputs(parts.outputs, parts.output_words);
  while (outputs.left() != 0) t->returns.push_back(parse_return(outputs, specs));
  if (!t->returns.empty() && t->returns.size() != op->schema().returns().size())
    throw LogError("a call of " + name + " describes the wrong number of results");
  mark_writes(*t);
  t->on_driver = driver.device().is_cpu() && runs_on_driver(*t);  // on cuda a buffer may lie on the host
  t->without_gradients = recorded_no_gradients(*t);
  t->of_attention = gives_gradients_of_attention(t->name);
  if (driver.device().is_cpu()) t->widening = widening_of(*t);
  t->digest = replay::digest(name.data(), name.size());
  for (const auto& [words, count] :
       {std::pair(parts.key, parts.key_words), std::pair(parts.outputs, parts.output_words)}) {
    const std::array<uint64_t, 2> both{t->digest, replay::digest(words, 8 * count)};
    t->digest = replay::digest(both.data(), sizeof both);
  }
  t->only_allocates = only_allocates(t->op.schema().name());
  t->leaves_unwritten = leaves_unwritten(t->op.schema().name());
  return t;
}

}  // namespace understudy::server
