// replay._replay: the control page of a rank on another host.
#include "replay/csrc/bindings/py_bind.h"

#include <string_view>

#include "replay/csrc/tools/mirror.h"

namespace py = pybind11;
namespace understudy::replay {
namespace {

py::bytes as_bytes(const std::vector<uint8_t>& content) {
  return {reinterpret_cast<const char*>(content.data()), content.size()};
}

}  // namespace

void bind_mirror(py::module_& m) {
  m.def(
      "control_state", [](const LogMap& l) { return as_bytes(control_state(l)); },
      "What worker and device server have written into a control page, and what it has no place for.");
  m.def(
      "apply_control_state",
      [](LogMap& l, const py::bytes& state, int64_t clock_offset_ns) {
        apply_control_state(l, std::string_view(state), clock_offset_ns);
      },
      py::arg("mirror"), py::arg("state"), py::arg("clock_offset_ns"), "Lays it out; raises LogError.");
  m.def(
      "control_orders", [](const LogMap& l) { return as_bytes(control_orders(l)); },
      "What proxyd has written into a mirror; always as many bytes.");
  m.def(
      "apply_control_orders",
      [](LogMap& l, const py::bytes& orders) { apply_control_orders(l, std::string_view(orders)); },
      "Does so in the log itself; raises LogError.");
  m.def(
      "manifest_place",
      [](const LogMap& l, uint64_t commit) {
        const Place found = manifest_place(l, commit);
        return std::make_pair(found.offset, found.bytes);
      },
      "(offset in the shadow area, bytes) of a commit's manifest; raises LogError.");
  m.def(
      "copy_shadow",
      [](const LogMap& l, uint64_t offset, uint64_t bytes) {
        return as_bytes(copy_shadow(l, offset, bytes));
      },
      "Bytes of the shadow area; raises LogError.");
  m.def(
      "put_shadow",
      [](LogMap& l, uint64_t offset, const py::bytes& content) {
        put_shadow(l, offset, std::string_view(content));
      },
      "Writes there; raises LogError.");
}

}  // namespace understudy::replay
