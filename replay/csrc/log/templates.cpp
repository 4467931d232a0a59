#include "replay/csrc/log/templates.h"

#include <algorithm>

namespace understudy::replay {

TemplateParts read_template(const LogMap& log, uint64_t id) {
  const ReaderPage page = log.page();
  if (id < page.worker().dictionary_begin.load(std::memory_order_acquire))
    throw LogError("a template is gone from the dictionary");
  const uint64_t tail = page.worker().dictionary_tail.load(std::memory_order_acquire);
  const uint64_t room = std::min(log.region_bytes() - id % log.region_bytes(), tail - id);
  if (id % kAlign != 0 || id >= tail || tail - id > log.dictionary_bytes() || room < sizeof(TemplateHeader))
    throw LogError("a template lies outside the dictionary");
  const uint8_t* p = log.template_at(id);
  const auto header = copy_once(*reinterpret_cast<const TemplateHeader*>(p));
  const uint64_t padded = (uint64_t{header.name_bytes} + 7) / 8 * 8;
  const uint64_t needed = sizeof header + padded + 8ull * header.key_words + 8ull * header.output_words;
  if (header.bytes != needed || needed > room) throw LogError("a template has an impossible length");
  p += sizeof header;
  const auto* words = reinterpret_cast<const uint64_t*>(p + padded);
  return {std::string(reinterpret_cast<const char*>(p), header.name_bytes), words, header.key_words,
          words + header.key_words, header.output_words};
}

}  // namespace understudy::replay
