#include "proxy_server/csrc/executor/step_digest.h"

#include "proxy_server/csrc/calls/call_values.h"
#include "proxy_server/csrc/state/device_state.h"
#include "replay/csrc/digest/digest.h"

namespace understudy::server {

using replay::Kind;

struct StepDigest::See {
  StepDigest& digest;
  DeviceState& state;
  bool known = true;

  void tensor(uint64_t handle, bool) { digest.words_.push_back(digest.name(handle, state)); }
  void host(const uint8_t* bytes, uint64_t count, bool) {
    digest.words_.push_back(replay::digest(bytes, count));
  }
  void numbers(const uint64_t* words, uint64_t count) {
    digest.words_.insert(digest.words_.end(), words, words + count);
  }
  void generator(uint64_t id) { digest.words_.push_back(id); }
  void composite() { known = false; }
};

void StepDigest::begin() {
  reset();
  active_ = true;
  value_ = 1;
}

uint64_t StepDigest::name(uint64_t handle, DeviceState& state) {
  const auto [known, first] = numbers_.try_emplace(handle, numbers_.size());
  if (!first) return known->second;
  const BufferTable::Buffer* b = state.table().find(handle);
  words_.push_back(b == nullptr ? 0 : b->committed_digest);
  return known->second;
}

void StepDigest::add(const replay::Record& r, Words words, TemplateCache& templates, DeviceState& state) {
  const auto kind = static_cast<Kind>(r.kind);
  words_.assign({r.kind});
  See see{*this, state};
  switch (kind) {
    case Kind::kOperator:
    case Kind::kOperatorSync: {
      const Template& t = templates.find(r.aux);
      words_.push_back(t.digest);
      visit_values(t, words, see);
      if (kind == Kind::kOperator)
        for (const ReturnSpec& want : t.returns)
          for (const OutputSpec& item : want.items)
            if (see.known && want.kind != 0 && item.fresh) see.tensor(words.next(), true);
      break;
    }
    case Kind::kHostToDevice: {
      see.tensor(r.aux, true);
      words_.push_back(words.next());
      const uint64_t bytes = words.next();
      see.host(words.take_bytes(bytes), bytes, false);
      break;
    }
    case Kind::kAllocate:
    case Kind::kResize:
      see.tensor(r.aux, true);
      see.numbers(words.take(1), 1);
      break;
    case Kind::kSeed:
    case Kind::kSetting:
      words_.push_back(r.aux);
      see.numbers(words.take(1), 1);
      break;
    case Kind::kEnvironment:
    case Kind::kGeneratorSet: {
      words_.push_back(r.aux);
      const uint64_t bytes = words.next();
      see.host(words.take_bytes(bytes), bytes, false);
      break;
    }
    case Kind::kCollective:
    case Kind::kCommunicatorCreate:
    case Kind::kCommunicatorDestroy:
      see.known = false;  // what others had a part in
      break;
    default:
      return;
  }
  if (!see.known) value_ = 0;
  if (value_ != 0) {
    words_.push_back(value_);
    value_ = replay::digest(words_.data(), 8 * words_.size());
  }
}

void StepDigest::end() {
  active_ = false;
  numbers_.clear();
}

}  // namespace understudy::server
