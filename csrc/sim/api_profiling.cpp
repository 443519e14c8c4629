// Logging and profiling: what a program reports goes nowhere, unless it asks for its log on the screen.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "sim/call.h"

namespace npc::sim {
namespace {

constexpr const char* kLevels[] = {"DEBUG", "INFO", "WARNING", "ERROR"};  // aclLogLevel

bool LogsToScreen() {
  static const bool on = [] {
    const char* value = std::getenv("ASCEND_SLOG_PRINT_TO_STDOUT");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  return on;
}

}  // namespace

NPC_SIM_API __attribute__((format(printf, 5, 6))) void aclAppLog(int level, const char* function,
                                                                 const char* file, uint32_t line,
                                                                 const char* format, ...) {
  if (!LogsToScreen() || level < 0 || level > 3) return;
  char text[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  std::printf("[%s] %s:%u %s: %s\n", kLevels[level], file, line, function, text);
}

// Accepted, and never called: nothing here starts or stops a profile.
NPC_SIM_API int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }

NPC_SIM_API uint64_t MsprofSysCycleTime() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000U + static_cast<uint64_t>(now.tv_nsec);
}

NPC_SIM_API uint64_t MsprofGetHashId(const char* text, size_t length) {
  uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (size_t i = 0; i < length; ++i) hash = (hash ^ static_cast<unsigned char>(text[i])) * 1099511628211U;
  return hash;
}

NPC_SIM_API int32_t MsprofReportApi(uint32_t, const void*) { return -1; }
NPC_SIM_API int32_t MsprofReportCompactInfo(uint32_t, void*, uint32_t) { return -1; }
NPC_SIM_API int32_t MsprofReportAdditionalInfo(uint32_t, void*, uint32_t) { return -1; }

}  // namespace npc::sim
