// A template of the dictionary, taken apart as far as that needs no PyTorch.
#pragma once
#include <string>

#include "replay/csrc/log/log_map.h"

namespace understudy::replay {

struct TemplateParts {
  std::string name;
  const uint64_t* key;  // in the dictionary, where a worker may still change the words
  uint64_t key_words;
  const uint64_t* outputs;
  uint64_t output_words;
};

// Throws LogError for one that does not lie in the dictionary, any more or at all, or is not as long as its
// parts.
TemplateParts read_template(const LogMap& log, uint64_t id);

}  // namespace understudy::replay
