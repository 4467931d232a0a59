// Whoever reads records: the device server, from a commit's offset, and `recoveryctl log dump`.
#include "fuzz/input.h"
#include "proxy_server/csrc/calls/words.h"
#include "replay/csrc/log/log_reader.h"
#include "replay/csrc/log/names.h"
#include "replay/csrc/log/templates.h"
#include "replay/csrc/tools/log_view.h"
#include "replay/csrc/tools/log_walk.h"

namespace understudy::fuzz {
namespace {

using replay::Kind;
using replay::LogError;
using replay::LogMap;
using replay::Record;
using server::Words;

volatile uint64_t sink;  // what was read is used

void use(const void* from, uint64_t bytes) {
  const auto* p = static_cast<const uint8_t*>(from);
  uint64_t sum = 0;
  for (uint64_t i = 0; i < bytes; i++) sum += p[i];
  sink = sink + sum;
}

void use_template(const LogMap& log, uint64_t offset) {
  const replay::TemplateParts parts = replay::read_template(log, offset);
  use(parts.name.data(), parts.name.size());
  for (Words words : {Words(parts.key, parts.key_words), Words(parts.outputs, parts.output_words)})
    while (words.left() != 0) sink = sink + words.next();
}

// The body of a record, as run_record.cpp takes it apart.
void read_body(const LogMap& log, const Record& r, const uint64_t* body) {
  use(body, 8ull * r.frees);
  const auto kind = static_cast<Kind>(r.kind);
  const uint64_t count = (r.bytes - sizeof(Record)) / 8 - r.frees;
  const uint64_t head = replay::is_sync(kind) ? 2 : 0;
  if (count < head) throw LogError("a sync record is too short");
  use(body + r.frees, 8 * head);
  Words words(body + r.frees + head, count - head);
  switch (kind) {
    case Kind::kOperator:
    case Kind::kOperatorSync:
      use(replay::name_of(kind), 1);
      use_template(log, r.aux);
      while (words.left() != 0) sink = sink + words.next();
      return;
    case Kind::kHostToDevice: {
      (void)words.next();
      const uint64_t bytes = words.next();
      return use(words.take_bytes(bytes), bytes);
    }
    case Kind::kEnvironment:
    case Kind::kGeneratorSet: {
      const uint64_t bytes = words.next();
      return use(words.take_bytes(bytes), bytes);
    }
    case Kind::kCollective: {
      replay::CollectiveHeader header;
      std::memcpy(&header, words.take(sizeof header / 8), sizeof header);
      use(replay::name_of(static_cast<replay::CollectiveKind>(header.kind)), 1);
      for (const uint64_t tensors : {header.inputs, header.outputs}) {
        words.count(tensors, 3);
        for (uint64_t i = 0; i < tensors; i++) {
          const uint64_t dimensions = words.next() >> 16 & 255;
          use(words.take(2 + 2 * dimensions), 8 * (2 + 2 * dimensions));
        }
      }
      return use(words.take(words.count(header.splits)), 8 * header.splits);
    }
    default:
      while (words.left() != 0) sink = sink + words.next();
  }
}

// As RankExecution::run_records does. Records are numbered, so none can be met twice.
void run(const LogMap& log, uint64_t offset, uint64_t index) {
  const uint64_t tail = log.page().worker().tail.load();
  replay::LogReader reader(log);
  for (uint64_t walked = 0; offset != tail; walked++) {
    require(walked <= log.segment_count() * log.segment_bytes() / sizeof(Record),
            "the executor reads for ever");
    const auto [r, body] = reader.read(offset, tail);
    if (r.index != index) throw LogError("a record carries another number");
    read_body(log, r, body);
    offset += r.bytes;
    index++;
  }
}

void read_texts(const replay::ReaderPage& page) {
  for (const std::string& text :
       {replay::text_of(page.server().error_operator), replay::text_of(page.server().error_message),
        replay::text_of(page.shared().lost_message)})
    use(text.data(), text.size());
}

void dump(const LogMap& log) {
  uint64_t records = 0;
  replay::for_each_record(log, std::nullopt, std::nullopt, [&](replay::RecordView&& view) {
    require(++records <= log.segment_count() * log.segment_bytes() / sizeof(Record), "a dump never ends");
    sink = sink + view.frees.size() + view.words.size();
  });
}

void walk(const LogMap& log) {
  replay::LogWalk walk(log);
  std::vector<uint64_t> named;
  for (uint64_t records = 0; const auto record = walk.next(1, ~0ull); records++) {
    require(records <= log.segment_count() * log.segment_bytes() / sizeof(Record), "a walk never ends");
    require(record->buffers.size() <= replay::LogWalk::kMostNamed, "a record names more than may be shown");
    for (const replay::NamedBuffer& buffer : record->buffers) {
      if (buffer.use.type != nullptr) use(buffer.use.type->name, 1);
      sink = sink + buffer.use.sizes[0];
      named.push_back(buffer.use.handle);
    }
    named.resize(std::min<size_t>(named.size(), 1000));
  }
  sink = sink + replay::LogWalk(log).freed(named).size();
}

template <class Reading>
void refuse_or(Reading&& reading) {
  try {
    reading();
  } catch (const LogError&) {
    // The one way to say no.
  }
}

}  // namespace
}  // namespace understudy::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using namespace understudy::fuzz;
  static Log memory;
  const auto log = memory.open(data, bytes);
  if (!log) return 0;
  refuse_or([&] { run(*log, memory.input.from, memory.input.from_index); });
  refuse_or([&] { (void)log->record(memory.input.from, memory.input.tail); });
  refuse_or([&] { dump(*log); });
  refuse_or([&] { walk(*log); });
  read_texts(log->page());
  return 0;
}
