// A thread's duty cycle: makes the calling thread as slow as a device that has only a share of a core.
//
// A timer on the thread's own CPU time interrupts it where it computes, never where it waits. There the thread sleeps for
// what it owes: by the CPU time c since it paid last, c / share - c. What it waited for a core meanwhile, because others
// computed there, counts as paid; what it waited for messages does not.
//
// The turns are short, for ranks that wait for one another wait for whoever sleeps: of four ranks that pass messages
// round, each slept in another's turn, and a long sleep of each delayed them all. The kernel's clock of tasks (a perf
// event) interrupts to the microsecond; where it is not to be had, a timer does at the kernel's ticks, 4 ms at 250 Hz.
//
// What the kernel does to send is not the device's work, as little as what gloo's threads do, and is neither slowed down
// nor interrupted: loaded before all else (LD_PRELOAD), this stands before writev, with which gloo sends. A thread that
// slept there held gloo's lock of the connection, and the other end's messages waited too (measured: 3 MB between two
// ranks of 0.4 of a core, at 400 Mbit/s both ways: 87 ms, and 60 without).
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace {

constexpr long long kSecond = 1'000'000'000;
constexpr long long kPeriod = 1'000'000;        // ns of CPU time from one interrupt to the next
constexpr int kSignal = 5;                      // of the real-time ones
constexpr long long kLeastSleep = 50'000;       // ns; shorter sleeps cost more than they pay
constexpr long long kMostCredit = 20'000'000;   // ns that a crowded core may have delayed it too long, and are given back

double owed_ratio = 0;  // ns owed for each ns of CPU time
long long used = 0;     // CPU time that is accounted for
long long delayed = 0;  // wait for a core that is accounted for
long long debt = 0;
int statistics = -1;    // the thread's schedstat
timer_t timer;
int task_clock = -1;    // the perf event, or -1 where the timer stands in
bool made = false;
pthread_t slowed;
volatile bool sending = false;

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
  if (!sending) pay();
  errno = kept;
}

// Have the thread signalled by its own CPU time to the microsecond; return whether the kernel lets it.
bool made_task_clock(pid_t thread) {
  perf_event_attr wanted;
  memset(&wanted, 0, sizeof wanted);
  wanted.size = sizeof wanted;
  wanted.type = PERF_TYPE_SOFTWARE;
  wanted.config = PERF_COUNT_SW_TASK_CLOCK;
  wanted.sample_period = kPeriod;
  wanted.wakeup_events = 1;
  wanted.disabled = 1;
  task_clock = static_cast<int>(syscall(SYS_perf_event_open, &wanted, 0, -1, -1, PERF_FLAG_FD_CLOEXEC));
  if (task_clock < 0) return false;
  const f_owner_ex owner = {F_OWNER_TID, thread};
  if (fcntl(task_clock, F_SETOWN_EX, &owner) || fcntl(task_clock, F_SETSIG, SIGRTMIN + kSignal) ||
      fcntl(task_clock, F_SETFL, O_ASYNC | O_NONBLOCK)) {
    close(task_clock);
    task_clock = -1;
  }
  return task_clock >= 0;
}

// Have the thread signalled by its own CPU time at the kernel's ticks.
bool made_timer(pid_t thread) {
  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGRTMIN + kSignal;
  event.sigev_notify_thread_id = thread;
  return !timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
}

bool made_clock() {
  prctl(PR_SET_TIMERSLACK, 1000);
  statistics = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  const pid_t thread = static_cast<pid_t>(syscall(SYS_gettid));
  return !sigaction(SIGRTMIN + kSignal, &action, nullptr) && (made_task_clock(thread) || made_timer(thread));
}

}  // namespace

extern "C" {

// Give the calling thread `share` of a core from now on, in (0, 1]. Returns 0, or errno.
int gsreal_throttle(double share) {
  owed_ratio = 1 / share - 1;
  used = now(CLOCK_THREAD_CPUTIME_ID);
  debt = 0;
  slowed = pthread_self();
  made = made || made_clock();
  if (!made) return errno;
  delayed = run_delay();
  const bool on = owed_ratio > 0;
  if (task_clock >= 0) return ioctl(task_clock, on ? PERF_EVENT_IOC_ENABLE : PERF_EVENT_IOC_DISABLE, 0) ? errno : 0;
  itimerspec period = {};
  period.it_value.tv_nsec = on ? kPeriod : 0;
  period.it_interval = period.it_value;
  return timer_settime(timer, 0, &period, nullptr) ? errno : 0;
}

ssize_t writev(int file, const iovec* parts, int count) {
  if (!made || !pthread_equal(pthread_self(), slowed)) return syscall(SYS_writev, file, parts, count);
  sending = true;
  const long long cpu = now(CLOCK_THREAD_CPUTIME_ID), delay = run_delay();
  const ssize_t written = syscall(SYS_writev, file, parts, count);
  const int kept = errno;
  used += now(CLOCK_THREAD_CPUTIME_ID) - cpu;
  delayed += run_delay() - delay;
  errno = kept;
  sending = false;
  return written;
}
}
