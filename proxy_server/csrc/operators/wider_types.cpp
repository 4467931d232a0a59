#include "proxy_server/csrc/operators/wider_types.h"

#include <algorithm>
#include <bit>
#include <string_view>

#include "proxy_server/csrc/calls/call_template.h"

namespace understudy::server {
namespace {

using c10::ScalarType;
using replay::Tag;

struct Row {
  std::string_view name;  // without overload, and without the underscore of what works in place
  std::vector<ScalarType> types;
};

const std::vector<Row>& table() {
  using enum ScalarType;
  static const std::vector<ScalarType> halves{Half, BFloat16}, integers{Byte, Char, Short, Int, Long};
  static const std::vector<ScalarType> transformed{Half, ComplexHalf};
  static const std::vector<Row> rows = [] {
    std::vector<Row> all{
        {"aten::abs", {Bool}},
        {"aten::trace", {Bool, ComplexHalf}},
        {"aten::histc", integers},
        {"aten::nansum", {ComplexHalf, ComplexFloat, ComplexDouble}},
        {"aten::rrelu_with_noise", {Half}},
        {"aten::avg_pool3d", halves},
        {"aten::avg_pool3d_backward", halves},
        {"aten::_upsample_bilinear2d_aa", halves},
        {"aten::_upsample_bilinear2d_aa_backward", halves},
        {"aten::_upsample_bicubic2d_aa", halves},
        {"aten::_upsample_bicubic2d_aa_backward", halves},
        {"aten::multi_margin_loss", halves},
        {"aten::multi_margin_loss_backward", halves},
        {"aten::multilabel_margin_loss_forward", halves},
        {"aten::multilabel_margin_loss_backward", halves},
        {"aten::_fft_r2c", transformed},
        {"aten::_fft_c2r", transformed},
        {"aten::_fft_c2c", transformed},
    };
    for (const char* name :
         {"aten::acos", "aten::acosh", "aten::angle", "aten::asin", "aten::asinh", "aten::atan",
          "aten::atanh", "aten::cos", "aten::cosh", "aten::div", "aten::exp", "aten::lerp", "aten::log",
          "aten::logaddexp", "aten::pow", "aten::prod", "aten::rsqrt", "aten::sigmoid", "aten::sin",
          "aten::sinh", "aten::sqrt", "aten::sum", "aten::tan", "aten::tanh",
          // their gradients
          "aten::cumprod", "aten::cumsum", "aten::flip", "aten::sigmoid_backward", "aten::tanh_backward"})
      all.push_back({name, {ComplexHalf}});
    return all;
  }();
  return rows;
}

ScalarType wider(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
      return ScalarType::Byte;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return ScalarType::Float;
    case ScalarType::ComplexHalf:
      return ScalarType::ComplexFloat;
    default:
      return c10::isIntegralType(type, /*includeBool=*/false) ? ScalarType::Double : type;
  }
}

// What a result of the wider kernel is in the end: half precision is of numbers that are complex or not.
ScalarType narrower(ScalarType result, ScalarType narrow) {
  const bool halves = narrow == ScalarType::Half || narrow == ScalarType::ComplexHalf;
  if (halves && result == ScalarType::Float) return ScalarType::Half;
  if (halves && result == ScalarType::ComplexFloat) return ScalarType::ComplexHalf;
  return result == wider(narrow) ? narrow : result;
}

std::string_view base_of(const Template& call) {
  std::string_view name = call.op.schema().name();
  if (name.ends_with('_')) name.remove_suffix(1);
  return name;
}

c10::IValue as_value(ScalarType type) { return static_cast<int64_t>(type); }
bool names(const c10::IValue& value, ScalarType type) { return value.isInt() && value == as_value(type); }

// The softmax of half precision that gives single precision is one operator on CUDA, and so is its gradient.
std::shared_ptr<const Widening> softmax(const Template& call) {
  const std::string_view name = base_of(call);
  const bool forward = name == "aten::_softmax" || name == "aten::_log_softmax";
  const bool backward = name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data";
  if ((!forward && !backward) || call.arguments[0].tag != Tag::kTensor) return nullptr;
  const ScalarType type = call.arguments[0].tensor->dtype;
  const int last = forward ? 2 : 3;  // whether results are wider, or the type of what the softmax was of
  const c10::IValue& given = call.arguments[static_cast<size_t>(last)].constant;
  if (forward && type == ScalarType::Half && given.isBool() && given.toBool())
    return std::make_shared<const Widening>(Widening{call.op, type, false, false, last, false});
  if (backward && type == ScalarType::Float && names(given, ScalarType::Half))
    return std::make_shared<const Widening>(
        Widening{call.op, ScalarType::Half, true, false, last, as_value(ScalarType::Float)});
  return nullptr;
}

const ArgumentSpec* of_one_of(const std::vector<ArgumentSpec>& arguments,
                              const std::vector<ScalarType>& types) {
  for (const ArgumentSpec& a : arguments)
    if (a.tag == Tag::kTensor && std::count(types.begin(), types.end(), a.tensor->dtype) != 0) return &a;
  return nullptr;
}

c10::OperatorHandle sum_as(const Template& nansum) {
  const bool out = nansum.op.schema().overload_name() == "out";
  return c10::Dispatcher::singleton().findSchemaOrThrow("aten::sum", out ? "IntList_out" : "dim_IntList");
}

// cuFFT's limit, and PyTorch's words for it: what a GPU refuses is not computed here.
void check_transformed_sizes(const Template& t, const torch::jit::Stack& stack) {
  if (!base_of(t).starts_with("aten::_fft_")) return;
  std::vector<int64_t> sizes;
  for (const int64_t dimension : stack[1].toIntVector()) sizes.push_back(stack[0].toTensor().size(dimension));
  if (base_of(t) == "aten::_fft_c2r" && !sizes.empty()) sizes.back() = stack[3].toInt();
  for (const int64_t size : sizes)
    TORCH_CHECK(
        size > 0 && std::has_single_bit(static_cast<uint64_t>(size)),
        "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, "
        "but got a signal size of",
        c10::IntArrayRef(sizes));
}

}  // namespace

std::shared_ptr<const Widening> widening_of(const Template& call) {
  if (auto found = softmax(call)) return found;
  const std::string_view name = base_of(call);
  for (const Row& row : table()) {
    if (row.name != name) continue;
    const ArgumentSpec* narrow = of_one_of(call.arguments, row.types);
    if (narrow == nullptr) return nullptr;
    Widening found{call.op, narrow->tensor->dtype, true, false, -1, {}};
    if (const auto i = call.op.schema().argumentIndexWithName("dtype");
        i && call.arguments[static_cast<size_t>(*i)].constant.isInt()) {  // what results are to be
      found.narrows_back = names(call.arguments[static_cast<size_t>(*i)].constant, found.narrow);
      if (found.narrows_back) found.argument = *i, found.instead = as_value(wider(found.narrow));
    }
    if (name == "aten::nansum") found.op = sum_as(call), found.skips_nan = true;
    return std::make_shared<const Widening>(std::move(found));
  }
  return nullptr;
}

void run_widened(const Template& t, c10::DispatchKeySet keys, torch::jit::Stack& stack) {
  const Widening& w = *t.widening;
  check_transformed_sizes(t, stack);
  struct Replaced {
    at::Tensor original, wide;
  };
  std::vector<Replaced> written;
  for (size_t i = 0; i < t.arguments.size(); i++) {
    c10::IValue& value = stack[i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor original = value.toTensor();
    const ScalarType type = narrower(wider(original.scalar_type()), w.narrow);
    if (type != original.scalar_type() || wider(type) == type) continue;
    const at::Tensor wide = original.to(wider(type));
    if (t.arguments[i].written) written.push_back({original, wide});
    value = wide;
  }
  if (w.skips_nan) {
    const at::Tensor all = stack[0].toTensor();
    stack[0] = at::where(at::isnan(all), at::zeros({}, all.options()), all);
  }
  if (w.argument >= 0) stack[static_cast<size_t>(w.argument)] = w.instead;
  if (t.on_driver)
    w.op.redispatchBoxed(keys, &stack);
  else
    w.op.callBoxed(stack);
  for (const Replaced& r : written) {
    if (r.original.sizes() != r.wide.sizes()) r.original.resize_(r.wide.sizes());
    r.original.copy_(r.wide);
  }
  for (c10::IValue& value : stack) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor result = value.toTensor();
    const auto same = std::find_if(written.begin(), written.end(),
                                   [&](const Replaced& r) { return r.wide.is_same(result); });
    if (same != written.end())
      value = same->original;
    else if (w.narrows_back)
      value = result.to(narrower(result.scalar_type(), w.narrow));
  }
}

std::vector<std::pair<std::string, std::string>> widened_operators() {
  std::vector<std::pair<std::string, std::string>> all;
  for (const Row& row : table())
    for (const ScalarType type : row.types) all.emplace_back(row.name, c10::toString(type));
  return all;
}

}  // namespace understudy::server
