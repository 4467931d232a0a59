// Commits of a log, and what they consist of.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "replay/csrc/bindings/py_bind.h"
#include "replay/csrc/rewind/manifest.h"
#include "replay/csrc/tools/log_view.h"

namespace py = pybind11;
namespace understudy::replay {
namespace {

struct Buffer {
  uint64_t handle, bytes;
  std::optional<uint64_t> digest;
  bool shadowed;
};

std::vector<Buffer> manifest_buffers(const LogMap& log, uint64_t number) {
  std::vector<Buffer> found;
  if (number == 0) return found;
  const Manifest manifest = Manifest::read(log.shadows(), commit_entry(log, number));
  for (const ManifestBuffer& b : manifest.buffers)
    found.push_back({b.handle, b.bytes, b.has_digest == 1 ? std::optional(b.digest) : std::nullopt,
                     b.shadow_offset != kNotShadowed || b.has_digest == 2});
  return found;
}

// Digests of some buffers at a commit, in the order asked for; none where it has none.
std::vector<std::optional<uint64_t>> digests(const LogMap& log, uint64_t number,
                                             const std::vector<uint64_t>& handles) {
  std::vector<std::optional<uint64_t>> found(handles.size());
  if (number == 0) return found;
  const Manifest manifest = Manifest::read(log.shadows(), commit_entry(log, number));
  std::unordered_map<uint64_t, uint64_t> of_handle;
  of_handle.reserve(manifest.buffers.size());
  for (const ManifestBuffer& b : manifest.buffers)
    if (b.has_digest == 1) of_handle.emplace(b.handle, b.digest);
  for (size_t i = 0; i < handles.size(); i++)
    if (const auto it = of_handle.find(handles[i]); it != of_handle.end()) found[i] = it->second;
  return found;
}

std::vector<py::bytes> short_rows(const LogMap& log) {
  std::vector<py::bytes> found;
  for (const CommitRow& row : commit_rows(log)) found.emplace_back(encode_short_row(row));
  return found;
}

}  // namespace

void bind_commits(py::module_& m, LogClass& log) {
  py::class_<CommitView>(m, "Commit")
      .def_readonly("number", &CommitView::number)
      .def_readonly("log_offset", &CommitView::log_offset)
      .def_readonly("record_index", &CommitView::record_index)
      .def_readonly("step", &CommitView::step)
      .def_readonly("call", &CommitView::call)
      .def_readonly("complete", &CommitView::complete)
      .def_readonly("has_manifest", &CommitView::has_manifest)
      .def_readonly("optimizer", &CommitView::optimizer)
      .def_readonly("communicators", &CommitView::communicators)
      .def_readonly("members", &CommitView::members)
      .def_readonly("step_digest", &CommitView::step_digest);
  py::class_<Buffer>(m, "Buffer")
      .def_readonly("handle", &Buffer::handle)
      .def_readonly("bytes", &Buffer::bytes)
      .def_readonly("digest", &Buffer::digest)
      .def_readonly("shadowed", &Buffer::shadowed);
  log.def("commits", &commits, "Commits still in the ring, oldest first.")
      .def("commit_rows", &short_rows, "Their rows: equal bytes are the same commit.")
      .def_static(
          "commit_of", [](const py::bytes& row) { return describe(decode_short_row(std::string_view(row))); },
          "A commit by such a row; raises LogError.")
      .def("digests", &digests, py::arg("commit"), py::arg("handles"),
           "XXH3-64 of these buffers at a commit, None for one without.")
      .def("manifest", &manifest_buffers, py::arg("commit"), "Buffers alive at a commit; none for commit 0.");
}

}  // namespace understudy::replay
