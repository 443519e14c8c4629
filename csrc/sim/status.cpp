#include "sim/status.h"

#include <cstdarg>
#include <cstdio>

namespace npc::sim {

Status Fail(acl::Error code, const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  return {code, text};
}

}  // namespace npc::sim
