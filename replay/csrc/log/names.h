// Names of kinds of records and collectives, one for logs, errors and tools.
#pragma once
#include "replay/csrc/log/log_format.h"

namespace understudy::replay {

inline const char* name_of(Kind kind) {
  static const char* const names[kKinds] = {"pad",
                                            "operator",
                                            "operator-sync",
                                            "free",
                                            "allocate",
                                            "resize",
                                            "host-to-device",
                                            "device-to-host",
                                            "seed",
                                            "generator-get",
                                            "generator-set",
                                            "generator-free",
                                            "phase",
                                            "commit",
                                            "setting",
                                            "communicator-create",
                                            "communicator-destroy",
                                            "collective",
                                            "synchronize",
                                            "end",
                                            "memory",
                                            "environment",
                                            "stream",
                                            "stream-mark",
                                            "stream-wait",
                                            "stream-use"};
  return static_cast<uint16_t>(kind) < kKinds ? names[static_cast<uint16_t>(kind)] : "unknown";
}

inline const char* name_of(CollectiveKind kind) {
  static const char* const names[kCollectiveKinds] = {"broadcast",
                                                      "all-reduce",
                                                      "reduce",
                                                      "all-gather",
                                                      "all-gather-base",
                                                      "gather",
                                                      "scatter",
                                                      "reduce-scatter",
                                                      "reduce-scatter-base",
                                                      "all-to-all-base",
                                                      "all-to-all",
                                                      "barrier",
                                                      "send",
                                                      "receive",
                                                      "receive-any",
                                                      "group-begin",
                                                      "group-end"};
  return static_cast<uint64_t>(kind) < kCollectiveKinds ? names[static_cast<uint64_t>(kind)] : "unknown";
}

}  // namespace understudy::replay
