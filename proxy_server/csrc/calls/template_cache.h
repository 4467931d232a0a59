// The templates that records have named, parsed once; those that are gone from the dictionary are dropped.
#pragma once
#include <memory>

#include "proxy_server/csrc/calls/call_template.h"
#include "replay/csrc/rewind/handle_map.h"

namespace understudy::server {

class TemplateCache {
 public:
  TemplateCache(const replay::LogMap& log, const Driver& driver) : log_(log), driver_(driver) {}

  // Good until the next find(). Throws as parse_template() does.
  const Template& find(uint64_t id) {
    const uint64_t begin = log_.page().worker().dictionary_begin.load(std::memory_order_relaxed);
    if (__builtin_expect(begin != begin_, 0)) drop_before(begin);
    if (const std::unique_ptr<Template>* known = templates_.find(id)) return **known;
    return **templates_.insert(id, parse_template(log_, id, driver_, specs_));
  }
  // Null if it was not parsed; never throws.
  const Template* find_parsed(uint64_t id) {
    const std::unique_ptr<Template>* known = templates_.find(id);
    return known != nullptr ? known->get() : nullptr;
  }

 private:
  void drop_before(uint64_t begin);

  const replay::LogMap& log_;
  const Driver& driver_;
  SpecTable specs_;
  replay::HandleMap<std::unique_ptr<Template>> templates_;  // by id
  uint64_t begin_ = 0;                                      // no template has a smaller id
};

}  // namespace understudy::server
