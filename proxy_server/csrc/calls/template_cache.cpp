#include "proxy_server/csrc/calls/template_cache.h"

namespace understudy::server {

void TemplateCache::drop_before(uint64_t begin) {
  std::vector<uint64_t> gone;
  for (const auto& [id, parsed] : templates_)
    if (id < begin) gone.push_back(id);
  for (const uint64_t id : gone) templates_.erase(id);
  specs_.drop_unused();
  begin_ = begin;
}

}  // namespace understudy::server
