// replay._replay: a log's records as dictionaries, for who shows them.
#include "replay/csrc/bindings/py_log_rows.h"

#include "replay/csrc/bindings/py_bind.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "replay/csrc/bindings/py_text.h"
#include "replay/csrc/log/names.h"
#include "replay/csrc/tools/log_walk.h"

namespace py = pybind11;
namespace understudy::replay {
namespace {

py::dict row_of(const RecordView& r) {
  py::dict row;
  row["index"] = r.index;
  row["offset"] = r.offset;
  row["bytes"] = r.bytes;
  row["kind"] = name_of(r.kind);
  row["aux"] = r.aux;
  row["frees"] = r.frees;
  row["done"] = r.done;
  if (r.operation) row["operator"] = as_text(*r.operation);
  if (r.sequence) row["sequence"] = *r.sequence;
  row["words"] = r.words;
  return row;
}

py::dict row_of(const LogMap& log, const NamedBuffer& buffer) {
  const BufferUse& use = buffer.use;
  py::dict row;
  row["handle"] = use.handle;
  if (use.type != nullptr) {
    row["type"] = use.type->name;
    row["size"] = std::vector<uint64_t>(use.sizes.begin(),
                                        use.sizes.begin() + std::min(use.dimensions, BufferUse::kMostSizes));
    if (use.dimensions > BufferUse::kMostSizes) row["dimensions"] = use.dimensions;
  } else {
    row["bytes"] = use.bytes;
  }
  if (buffer.maker) {
    row["made_by"] = buffer.maker->record;
    const Kind kind = buffer.maker->kind;
    row["made_by_call"] =
        as_text(is_operator(kind) ? template_name(log, buffer.maker->aux) : std::string(name_of(kind)));
  }
  return row;
}

py::dict row_of(const LogMap& log, const WalkedRecord& record) {
  py::dict row = row_of(record.view);
  py::list buffers;
  for (const NamedBuffer& buffer : record.buffers) buffers.append(row_of(log, buffer));
  row["buffers"] = buffers;
  if (record.left_out != 0) row["buffers_left_out"] = record.left_out;
  if (record.results_from) row["results_from"] = *record.results_from;
  if (!record.makes_sense) row["unreadable"] = true;
  return row;
}

// `count` at most.
py::list rows(LogWalk& walk, const LogMap& log, uint64_t first, uint64_t end, uint64_t count) {
  py::list found;
  while (found.size() < count) {
    std::optional<WalkedRecord> record;
    {
      py::gil_scoped_release release;
      record = walk.next(first, end);
    }
    if (!record) break;
    found.append(row_of(log, *record));
  }
  return found;
}

struct Walk {
  const LogMap& log;
  LogWalk walk;
};

}  // namespace

py::list dump(const LogMap& log, std::optional<uint64_t> first, std::optional<uint64_t> count) {
  py::list found;
  for_each_record(log, first, count, [&](RecordView&& r) { found.append(row_of(r)); });
  return found;
}

void bind_log_walk(py::module_& m) {
  py::class_<Walk>(m, "LogWalk",
                   "One pass over the records that a log holds now; knows who made the buffers.")
      .def(py::init([](const LogMap& log) { return new Walk{log, LogWalk(log)}; }), py::keep_alive<1, 2>())
      .def(
          "rows",
          [](Walk& w, uint64_t first, uint64_t end, uint64_t count) {
            return rows(w.walk, w.log, first, end, count);
          },
          py::arg("first"), py::arg("end"), py::arg("count"),
          "The next records of [first, end) by index, `count` at most; none: there are no more.")
      .def(
          "freed", [](Walk& w, const std::vector<uint64_t>& handles) { return w.walk.freed(handles); },
          py::call_guard<py::gil_scoped_release>(),
          "Goes on to the end: {handle: index of the record that frees it}.")
      .def_property_readonly("first_index", [](const Walk& w) { return w.walk.first_index(); })
      .def_property_readonly("knows_all", [](const Walk& w) { return w.walk.knows_all(); });
}

}  // namespace understudy::replay
