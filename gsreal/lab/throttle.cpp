// A thread's duty cycle: makes the calling thread as slow as a device that has only a share of a core.
//
// A timer on the thread's own CPU time interrupts it where it computes, never where it waits. There the thread sleeps for
// what it owes: by the CPU time c since it paid last, c / share - c. What it waited for a core meanwhile, because others
// computed there, counts as paid; what it waited for messages does not.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace {

constexpr long long kSecond = 1'000'000'000;
constexpr long long kPeriod = 1'000'000;        // ns of CPU time; the kernel looks at each tick (4 ms at 250 Hz)
constexpr long long kLeastSleep = 50'000;       // ns; shorter sleeps cost more than they pay
constexpr long long kMostCredit = 20'000'000;   // ns that a crowded core may have delayed it too long, and are given back

double owed_ratio = 0;  // ns owed for each ns of CPU time
long long used = 0;     // CPU time that is accounted for
long long delayed = 0;  // wait for a core that is accounted for
long long debt = 0;
int statistics = -1;    // the thread's schedstat
timer_t timer;
bool made = false;

long long now(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

// The time that the thread has been ready to run, but waited for a core; 0 where the kernel does not count it.
long long run_delay() {
  char text[96];
  if (statistics < 0) return 0;
  const ssize_t length = pread(statistics, text, sizeof text - 1, 0);
  if (length <= 0) return 0;
  text[length] = 0;
  char* rest = text;
  strtoll(text, &rest, 10);  // CPU time
  return strtoll(rest, nullptr, 10);
}

void pay() {
  const long long cpu = now(CLOCK_THREAD_CPUTIME_ID), delay = run_delay();
  debt += static_cast<long long>((cpu - used) * owed_ratio) - (delay - delayed);
  used = cpu;
  delayed = delay;
  if (debt < -kMostCredit) debt = -kMostCredit;
  if (debt < kLeastSleep) return;
  const long long begin = now(CLOCK_MONOTONIC), end = begin + debt;
  const timespec until = {end / kSecond, end % kSecond};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
  debt -= now(CLOCK_MONOTONIC) - begin;
  delayed = run_delay();  // the wait for a core at the sleep's end is in what was paid
}

void on_signal(int) {
  const int kept = errno;
  pay();
  errno = kept;
}

}  // namespace

extern "C" {

// Give the calling thread `share` of a core from now on, in (0, 1]. Returns 0, or errno.
int gsreal_throttle(double share) {
  owed_ratio = 1 / share - 1;
  used = now(CLOCK_THREAD_CPUTIME_ID);
  debt = 0;
  if (!made) {
    prctl(PR_SET_TIMERSLACK, 1000);
    statistics = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    struct sigaction action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    if (sigaction(SIGRTMIN + 5, &action, nullptr)) return errno;
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGRTMIN + 5;
    event.sigev_notify_thread_id = static_cast<pid_t>(syscall(SYS_gettid));
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer)) return errno;
    made = true;
  }
  delayed = run_delay();
  itimerspec period = {};
  period.it_value.tv_nsec = owed_ratio > 0 ? kPeriod : 0;
  period.it_interval = period.it_value;
  return timer_settime(timer, 0, &period, nullptr) ? errno : 0;
}
}
