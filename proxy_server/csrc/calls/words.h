#pragma once
#include "replay/csrc/log/words.h"

namespace understudy::server {

using replay::Words;

}  // namespace understudy::server
