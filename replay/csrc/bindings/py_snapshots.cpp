// Snapshots in a log's memory: ordered, published, read, and brought back from storage.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "replay/csrc/bindings/py_bind.h"
#include "replay/csrc/rewind/manifest.h"
#include "replay/csrc/tools/log_view.h"
#include "replay/csrc/tools/snapshot_restore.h"

namespace py = pybind11;
namespace understudy::replay {
namespace {

struct Contents {
  CommitView commit;
  py::bytes row, manifest;
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>> buffers, generators;
};

Contents contents_of(const SnapshotContents& found) {
  std::string manifest(found.manifest.encoded_bytes(), '\0');
  found.manifest.encode(reinterpret_cast<uint8_t*>(manifest.data()));
  const std::vector<uint8_t> row = encode_row(found.commit);
  Contents contents{describe(found.commit),
                    py::bytes(reinterpret_cast<const char*>(row.data()), row.size()),
                    py::bytes(manifest),
                    {},
                    {}};
  for (const ManifestBuffer& b : found.manifest.buffers)
    if (b.shadow_offset != kNotShadowed)
      contents.buffers.emplace_back(b.handle, b.bytes, b.digest, b.shadow_offset);
  for (const ManifestGenerator& g : found.manifest.generators)
    contents.generators.emplace_back(g.generator, g.bytes, 0, g.shadow_offset);
  return contents;
}

Contents read_contents(const LogMap& log, uint64_t serial) {
  return contents_of(snapshot_contents(log, serial));
}

Contents begin_restore(LogMap& log, const py::bytes& row, const py::bytes& manifest) {
  const std::string_view rest(manifest);
  return contents_of(
      make_room_for_snapshot(log, decode_row(std::string_view(row)), {rest.begin(), rest.end()}));
}

void finish_restore(LogMap& log, uint64_t serial, const Contents& contents,
                    const std::vector<uint64_t>& checked) {
  const std::string_view rest(contents.manifest);
  const CommitRow commit = decode_row(std::string_view(contents.row));
  const std::vector<uint8_t> manifest(rest.begin(), rest.end());
  py::gil_scoped_release release;
  publish_restored_snapshot(log, serial, commit, manifest, checked);
}

}  // namespace

void bind_snapshots(py::module_& m, LogClass& log) {
  py::class_<SnapshotView>(m, "Snapshot")
      .def_readonly("serial", &SnapshotView::serial)
      .def_readonly("bytes", &SnapshotView::bytes)
      .def_readonly("seconds", &SnapshotView::seconds)
      .def_readonly("commit", &SnapshotView::commit);
  py::class_<Contents>(m, "SnapshotContents", "Buffers and generators: (handle, bytes, digest, offset).")
      .def_readonly("commit", &Contents::commit)
      .def_readonly("row", &Contents::row)
      .def_readonly("manifest", &Contents::manifest)
      .def_readonly("buffers", &Contents::buffers)
      .def_readonly("generators", &Contents::generators);
  log.def_property(
         "snapshot_floor", [](const LogMap& l) { return load(l.page().daemon().snapshot_floor); },
         [](LogMap& l, uint64_t serial) {
           l.daemon_page().daemon().snapshot_floor.store(serial, std::memory_order_release);
         })
      .def_property(
          "snapshot_suspended",
          [](const LogMap& l) { return load(l.page().daemon().snapshot_suspended) != 0; },
          [](LogMap& l, bool on) {
            l.daemon_page().daemon().snapshot_suspended.store(on ? 1 : 0, std::memory_order_release);
          })
      .def_property_readonly("snapshot_limit", [](const LogMap& l) { return l.snapshots().bytes; })
      .def_property_readonly("snapshot_ordered",
                             [](const LogMap& l) {
                               uint64_t newest = 0;
                               for (const auto& order : l.page().daemon().snapshot_orders)
                                 newest = std::max(newest, serial_of(load(order)));
                               return newest;
                             })
      .def(
          "describe_snapshot",
          [](LogMap& l, uint64_t serial) {
            l.daemon_page().daemon().snapshot_described[serial % kSnapshotOrders].store(
                serial, std::memory_order_release);
          },
          "The worker is to say what that snapshot consists of; to be called before it is ordered.")
      .def(
          "order_snapshot",
          [](LogMap& l, uint64_t serial, std::optional<uint64_t> step) {
            if (step && *step >= kAtNextCommit) throw LogError("no step can be that late");
            l.daemon_page().daemon().snapshot_orders[serial % kSnapshotOrders].store(
                order_of(serial, step.value_or(kAtNextCommit)), std::memory_order_release);
          },
          py::arg("serial"), py::arg("step") = py::none(),
          "A snapshot of the first commit with so many optimizer steps; without a step: of the next commit. "
          "It takes the place of the one SNAPSHOT_ORDERS serials before it.")
      .def("snapshots", &snapshots, "Published snapshots, oldest first.")
      .def("snapshot_contents", &read_contents, "Of a published snapshot; raises LogError.")
      .def("snapshot_holds", &snapshot_holds, "Whether what was read of it until now is its content.")
      .def("begin_restore", &begin_restore, py::arg("row"), py::arg("manifest"),
           "Withdraws all snapshots and says where the contents of a stored one go; raises LogError.")
      .def("finish_restore", &finish_restore, py::arg("serial"), py::arg("contents"),
           py::arg("checked") = std::vector<uint64_t>(),
           "Publishes it, now that its contents are there; raises LogError if they are not. `checked`: "
           "handles "
           "of buffers that need no other look.")
      .def(
          "lease_snapshots",
          [](LogMap& l, const std::vector<uint64_t>& serials) {
            if (serials.size() > kSnapshotLeases) throw LogError("too many snapshots are leased");
            for (size_t i = 0; i < kSnapshotLeases; i++)
              l.daemon_page().daemon().snapshot_leases[i].store(i < serials.size() ? serials[i] : 0);
          },
          "These, and no others, stay as they are while they are read.");
}

}  // namespace understudy::replay
