// Running one operator: arguments from the record, results into buffers.
#include <algorithm>
#include <optional>

#include "proxy_server/csrc/calls/call_results.h"
#include "proxy_server/csrc/calls/composite.h"
#include "proxy_server/csrc/driver/cleared_memory.h"
#include "proxy_server/csrc/executor/rank_execution.h"

namespace understudy::server {

using replay::ErrorKind;
using replay::LogError;
using replay::Record;
using replay::Tag;

// Tensors that the running operator writes. A view is used again by later calls, so it must not keep what an
// operator did to its metadata (resize_, transpose_, an out= variant).
class WrittenViews {
 public:
  void add(uint64_t handle, Content& content, const TensorSpec* spec) {
    views_.push_back({handle, &content, spec});
  }
  // What the operator left in them, for a validation.
  void note(Validation& validation, uint64_t record, const DeviceState& state) const {
    for (const Written& w : views_) validation.note(record, w.handle, state.digest(*w.content));
  }
  // The operator ended: keep what still is as its spec says. `results` are its own, of which the worker
  // expects what `t` says, or is told.
  void check(const Template& t, const torch::jit::Stack& results, bool told) {
    for (const auto& [handle, content, spec] : views_)
      if (const at::Tensor* view = content->find(spec->serial);
          view && !is_as_specified(*view, *content, *spec)) {
        write_out(*view, expected_flags(*view, *spec, t, results, told));
        content->forget(spec->serial);
      }
    views_.clear();
  }
  ~WrittenViews() {  // it failed half-way
    for (const Written& w : views_) w.content->forget(w.spec->serial);
  }

 private:
  static bool is_as_specified(const at::Tensor& view, const Content& content, const TensorSpec& spec) {
    const c10::TensorImpl& impl = *view.unsafeGetTensorImpl();
    return impl.sizes() == c10::IntArrayRef(spec.sizes) && impl.strides() == c10::IntArrayRef(spec.strides) &&
           impl.storage_offset() == spec.offset && impl.dtype() == spec.type &&
           impl.unsafe_storage().unsafeGetStorageImpl() == content.storage().unsafeGetStorageImpl() &&
           impl.autograd_meta() == nullptr && impl.is_conj() == ((spec.flags & replay::kConjugate) != 0) &&
           impl.is_neg() == ((spec.flags & replay::kNegative) != 0);
  }

  static uint64_t expected_flags(const at::Tensor& view, const TensorSpec& spec, const Template& t,
                                 const torch::jit::Stack& results, bool told) {
    const uint64_t now = (view.is_conj() ? replay::kConjugate : 0) | (view.is_neg() ? replay::kNegative : 0);
    for (size_t i = 0; i < results.size(); i++)
      if (results[i].isTensor() && results[i].toTensor().is_same(view)) {
        if (told) return now;
        if (i < t.returns.size() && (t.returns[i].flags & replay::kOtherFlags) != 0)
          return t.returns[i].flags;
      }
    return spec.flags;
  }

  // An operator may conjugate or negate what it wrote lazily, by a bit that the worker's tensor does not
  // have: do it for good.
  static void write_out(const at::Tensor& view, uint64_t expected) {
    const bool conjugate = (expected & replay::kConjugate) != 0;
    const bool negative = (expected & replay::kNegative) != 0;
    if (view.is_conj() == conjugate && view.is_neg() == negative) return;
    const at::Tensor value = view.resolve_conj().resolve_neg().clone();
    view._set_conj(conjugate);
    view._set_neg(negative);
    view.copy_(value);
  }

  struct Written {
    uint64_t handle;
    Content* content;
    const TensorSpec* spec;
  };
  c10::SmallVector<Written, 4> views_;
};

namespace {

bool is_one_of(const c10::IValue& value, const std::vector<at::Tensor>& tensors) {
  return value.isTensor() && std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
           return tensor.is_same(value.toTensor());
         });
}

// Values of one call, read in the order of its template.
class Values {
 public:
  Values(DeviceState& state, const Driver& driver, Words& words, WrittenViews& written,
         ArgumentStorages* storages = nullptr)
      : state_(state), driver_(driver), words_(words), written_(written), storages_(storages) {}

  c10::IValue get(const ArgumentSpec& a) {
    switch (a.tag) {
      case Tag::kTensor:
        return device_tensor(a);
      case Tag::kNone:
        return {};
      case Tag::kUndefined:
        return at::Tensor();
      case Tag::kCpuTensor:
        return host_tensor(a);
      case Tag::kSparse:
      case Tag::kSparseCompressed:
      case Tag::kNested:
        return composite(a);
      case Tag::kTensorList: {
        c10::List<at::Tensor> list;
        list.reserve(a.items.size());
        for (const ArgumentSpec& item : a.items) list.push_back(item_tensor(item));
        return list;
      }
      case Tag::kOptionalTensorList: {
        c10::List<std::optional<at::Tensor>> list;
        list.reserve(a.items.size());
        for (const ArgumentSpec& item : a.items) {
          if (item.tag == Tag::kUndefined)
            list.push_back(std::nullopt);
          else
            list.push_back(item_tensor(item));
        }
        return list;
      }
      case Tag::kDouble:
        return words_.next_double();
      case Tag::kComplex: {
        const double real = words_.next_double();
        return c10::complex<double>(real, words_.next_double());
      }
      case Tag::kDoubleList: {
        c10::List<double> list;
        for (uint64_t i = 0; i < a.count; i++) list.push_back(words_.next_double());
        return list;
      }
      case Tag::kList: {
        c10::impl::GenericList list(c10::NumberType::get());
        for (const ArgumentSpec& item : a.items) list.push_back(get(item));
        return list;
      }
      case Tag::kGenerator:
        return state_.generator(words_.next());
      default:
        return a.constant;
    }
  }

  std::vector<at::Tensor> written_composites;

 private:
  at::Tensor item_tensor(const ArgumentSpec& a) {
    if (a.tag == Tag::kTensor) return device_tensor(a);
    if (a.tag == Tag::kUndefined) return {};
    return is_composite(a.tag) ? composite(a) : host_tensor(a);
  }

  at::Tensor composite(const ArgumentSpec& a) {
    at::Tensor t = rebuild_composite(a, words_, state_, driver_, storages_);
    if (a.written) written_composites.push_back(t);
    return t;
  }

  at::Tensor device_tensor(const ArgumentSpec& a) {
    const uint64_t handle = words_.next();
    Content& content = a.written ? state_.write(handle) : state_.read(handle);
    if (storages_ != nullptr) storages_->emplace_back(content.storage().unsafeGetStorageImpl(), handle);
    if (a.written) written_.add(handle, content, a.tensor.get());
    check_extent(content, *a.tensor);
    if (__builtin_expect(a.on_host && !content.storage().device().is_cpu(), 0)) {  // restored, say
      state_.table().begin_move(handle);
      content = driver_.host_copy(content);
    }
    if (const at::Tensor* known = content.find(a.tensor->serial)) return *known;
    return content.keep(a.tensor->serial, view_of(content, *a.tensor));
  }

  at::Tensor host_tensor(const ArgumentSpec& a) {
    const TensorSpec& spec = *a.tensor;
    at::Tensor t = at::empty(spec.sizes, at::TensorOptions().dtype(spec.dtype));
    const uint8_t* bytes = words_.take_bytes(t.nbytes());
    if (t.nbytes() != 0) std::memcpy(t.mutable_data_ptr(), bytes, t.nbytes());
    if (spec.flags & replay::kWrappedNumber) t.unsafeGetTensorImpl()->set_wrapped_number(true);
    return t;
  }

  DeviceState& state_;
  const Driver& driver_;
  Words& words_;
  WrittenViews& written_;
  ArgumentStorages* storages_;
};

// May a kernel's result serve later calls as the view that `want` describes?
bool is_view(const at::Tensor& result, const TensorSpec& want) {
  const c10::TensorImpl& impl = *result.unsafeGetTensorImpl();
  return want.flags == 0 && impl.strides() == c10::IntArrayRef(want.strides) && !impl.is_wrapped_number() &&
         impl.autograd_meta() == nullptr;
}

// A GPU's allocator cannot be told to.
void clear_results(const torch::jit::Stack& stack) {
  if (at::globalContext().deterministicAlgorithms() &&
      at::globalContext().deterministicFillUninitializedMemory())
    return;  // they are filled already
  for (const c10::IValue& value : stack)
    if (value.isTensor() && value.toTensor().layout() == at::kStrided) value.toTensor().zero_();
}

}  // namespace

// The result becomes the buffer `handle`, in the layout the worker expects.
void RankExecution::bind(uint64_t handle, at::Tensor result, const OutputSpec& spec, const Template& t) {
  const TensorSpec& want = *spec.tensor;
  TORCH_CHECK(result.defined(), t.name, " gave no tensor where the worker expects one");
  TORCH_CHECK(result.scalar_type() == want.dtype && result.sizes() == c10::IntArrayRef(want.sizes), t.name,
              " gave a ", result.scalar_type(), " tensor of shape ", result.sizes(),
              " where the worker expects ", want.dtype, " ", c10::IntArrayRef(want.sizes));
  bool same = result.storage().use_count() == 1 && result.storage_offset() == want.offset &&
              result.storage().nbytes() == spec.storage_bytes &&
              result.is_conj() == ((want.flags & replay::kConjugate) != 0) &&
              result.is_neg() == ((want.flags & replay::kNegative) != 0);
  for (size_t i = 0; same && result.numel() > 1 && i < want.sizes.size(); i++)
    same = want.sizes[i] == 1 || want.strides[i] == result.stride(static_cast<int64_t>(i));
  if (!same) {
    c10::Storage storage = state_.allocate_cleared(spec.storage_bytes);
    view_of(storage, want).copy_(result);
    state_.create(handle, std::move(storage));
  } else {
    Content& made = state_.create(handle, result.storage());
    if (is_view(result, want)) made.keep(want.serial, std::move(result));
  }
  if (__builtin_expect(validation_.active(), 0))
    validation_.note(at_.index, handle, state_.digest(state_.read(handle)));
}

// Runs the kernel: arguments on the stack become results.
void RankExecution::run_kernel(const Template& t, WrittenViews& written, bool told) {
  const ClearedMemory cleared(t.leaves_unwritten || validation_.active());
  std::optional<at::NoGradGuard> unrecorded;
  if (__builtin_expect(t.without_gradients, 0)) unrecorded.emplace();
  std::optional<OnlyExact> only_exact;
  if (__builtin_expect(t.of_attention, 0)) only_exact.emplace();
  if (__builtin_expect(t.widening != nullptr, 0)) {
    run_widened(t, c10::DispatchKeySet(driver_.key()), stack_);
  } else if (t.on_driver) {
    t.op.redispatchBoxed(c10::DispatchKeySet(driver_.key()), &stack_);
  } else {
    t.op.callBoxed(stack_);
  }
  if (__builtin_expect(t.only_allocates, 0) && driver_.device().is_cuda()) clear_results(stack_);
  if (__builtin_expect(validation_.active(), 0)) written.note(validation_, at_.index, state_);
  written.check(t, stack_, told);
}

// Behind an error that may have come amid it: it changes nothing but its results.
static bool may_run_again(const Template& t) {
  return !t.writes && !t.op.hasTag(at::Tag::nondeterministic_seeded);
}

void RankExecution::run_operator(const Record& r, Words words) {
  const Template& t = templates_.find(r.aux);
  stack_.clear();
  {
    const Words arguments = words;
    const auto run = [&] {
      WrittenViews written;
      Values values(state_, driver_, words = arguments, written);
      state_.copy_together([&] {
        for (const ArgumentSpec& a : t.arguments) stack_.push_back(values.get(a));
      });
      run_kernel(t, written, /*told=*/false);
    };
    for (;;) {
      try {
        run();
        break;
      } catch (const c10::Error& e) {
        if (!out_of_memory(e) || !may_run_again(t) || !state_.make_room()) throw;
        stack_.clear();
      }
    }
  }
  if (stack_.size() < t.returns.size()) throw LogError("a call returned too little");
  for (size_t i = 0; i < t.returns.size(); i++) {
    const ReturnSpec& want = t.returns[i];
    if (want.kind == 1) {
      if (want.items[0].fresh) bind(words.next(), std::move(stack_[i]).toTensor(), want.items[0], t);
    } else if (want.kind == 2) {
      std::vector<at::Tensor> results = std::move(stack_[i]).toTensorVector();
      stack_[i] = {};
      TORCH_CHECK(results.size() == want.items.size(), t.name, " gave ", results.size(),
                  " tensors, the worker expects ", want.items.size());
      for (size_t k = 0; k < results.size(); k++)
        if (want.items[k].fresh) bind(words.next(), std::move(results[k]), want.items[k], t);
    } else if (want.kind == 3) {
      const c10::IValue& gave = stack_[i];
      TORCH_CHECK(gave.isInt() && gave.toInt() == want.number, t.name, " gave ", gave,
                  " where the worker expects ", want.number);
    }
  }
  stack_.clear();  // before the next record frees what the stack refers to
}

// What fused attention tells beside its tensors depends on shapes alone; the others need what is computed.
static bool waits_for_the_device(const Template& t) { return t.name.find("attention") == std::string::npos; }

void RankExecution::run_operator_sync(const Record& r, uint64_t* reply_words, Words words) {
  const Template& t = templates_.find(r.aux);
  stack_.clear();
  ArgumentStorages storages;
  std::vector<at::Tensor> written_composites;
  uint64_t first_handle;
  {
    WrittenViews written;
    Values values(state_, driver_, words, written, &storages);
    state_.copy_together([&] {
      for (const ArgumentSpec& a : t.arguments) stack_.push_back(values.get(a));
    });
    first_handle = words.next();
    if (waits_for_the_device(t)) driver_.announce_waiting();
    run_kernel(t, written, /*told=*/true);
    written_composites = std::move(values.written_composites);
  }
  const torch::jit::Stack stack = std::move(stack_);
  CallResults results(state_, storages, first_handle);
  for (const c10::IValue& value : stack)  // a changed argument follows below, once
    results.add(is_one_of(value, written_composites) ? c10::IValue() : value);
  for (const at::Tensor& composite : written_composites) results.add(composite);
  if (__builtin_expect(roll_.active(), 0)) roll_.note_results(first_handle, state_);
  if (__builtin_expect(validation_.active(), 0))
    for (uint64_t handle = first_handle; handle < results.end_handle(); handle++)
      validation_.note(at_.index, handle, state_.digest(state_.read(handle)));
  const std::vector<uint64_t>& answer = results.words();
  reply(reply_words, answer.data(), 8 * answer.size(), ErrorKind::kNone);
}

}  // namespace understudy::server
