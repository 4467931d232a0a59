#pragma once
#include "replay/csrc/words.h"

namespace understudy::server {

using replay::Words;

}  // namespace understudy::server
